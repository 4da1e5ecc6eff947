"""C. Cheating the comparison: stale memory, wrong structure, patched comparators, less precision than
promised.

Attack 30, scanning GPU memory, needs a GPU; its file lies under tests/gpu/redteam.
"""

from tests.redteam.case import CHECKED, Case
from tests.redteam.tasks import (
    LINEAR,
    NEAR_IDENTITY,
    ROW_MEAN,
    TINY_OUTPUT,
    kernel,
    module,
    stateless_kernel,
    stateless_module,
)


def _wrong(number: int, name: str, why: str, forward: str, evidence: str, before: str = "", **more) -> Case:
    return Case(
        number=number,
        name=name,
        why=why,
        candidate=module(forward, before=before),
        outcomes=("incorrect",),
        evidence=evidence,
        **more,
    )


def _looking_for(collect: str) -> str:
    """A forward that returns any tensor of the output's shape that `collect` finds, else zeros."""
    return f"""
    mine = {{x.data_ptr(), self.weight.data_ptr()}}
    for found in {collect}:
        if isinstance(found, torch.Tensor) and found.shape == (256, 256) and found.data_ptr() not in mine:
            return found.clone()
    return x.new_zeros(256, 256)
    """


FRAMES = """
import gc, sys

def on_the_stack():
    frame = sys._getframe()
    while frame is not None:
        for value in (*frame.f_locals.values(), *frame.f_globals.values()):
            yield value
            if isinstance(value, (list, tuple)):
                yield from value
            elif isinstance(value, dict):
                yield from value.values()
        frame = frame.f_back
"""

CASES = [
    _wrong(
        19,
        "stale_memory",
        "torch.empty receives the freed block that held the reference's output",
        "return x.new_empty(256, 256)",
        "wrong result",
    ),
    Case(
        number=19,
        name="stale_memory_native",
        why="the output buffer is left as it is found",
        candidate=kernel("    (void)x;"),
        outcomes=("incorrect",),
        evidence="never written",
    ),
    Case(
        number=19,
        name="stale_memory_after_the_check",
        why="a freed buffer still holds the answer of the same input set, so nothing need be written when "
        "timed",
        candidate=kernel("    static int calls = 0;\n    if (++calls <= 7) honest(x, weight, bias, out);"),
        outcomes=("ok", "incorrect", "integrity"),
        evidence="wrong result|earlier call",
    ),
    _wrong(
        20,
        "inputs_zeroed",
        "inputs are overwritten before the reference sees them, so that the answer is easy",
        "x.zero_()\nreturn torch.relu(self.bias).expand(256, 256).clone()",
        "wrong result",
    ),
    _wrong(
        20,
        "parameters_zeroed",
        "weights are zeroed, in the hope that the reference shares them",
        "self.weight.zero_(); self.bias.zero_()\nreturn x.new_zeros(256, 256)",
        "wrong result",
    ),
    _wrong(
        21,
        "random_numbers_patched",
        "torch.randn and manual_seed draw zeros, so inputs and weights are known",
        "return x.new_zeros(256, 256)",
        "wrong result",
        before="""
import torch.random
torch.manual_seed = torch.random.manual_seed = lambda seed: None
torch.randn = torch.rand = lambda *shape, **_: torch.zeros(*shape)
""",
    ),
    _wrong(
        21,
        "inputs_regenerated",
        "the generator is reseeded and inputs and answers drawn again",
        "torch.manual_seed(0)\nreturn self.honest(torch.randn(256, 256).to(x.device))",
        "wrong result",
    ),
    _wrong(
        22,
        "reference_numerics_by_flags",
        "flags and patched functions are to change what the reference computes",
        "return x.new_zeros(256, 256)",
        "wrong result",
        before="""
torch.relu = torch.nn.functional.relu = torch.zeros_like
torch.nn.init.normal_ = torch.nn.init.zeros_
torch.set_default_dtype(torch.float64)
torch.backends.mkldnn.enabled = False
torch.set_flush_denormal(True)
""",
    ),
    Case(
        number=23,
        name="input_returned",
        why="for an operation that hardly changes its input the input itself is returned",
        candidate=stateless_module("return x"),
        task=NEAR_IDENTITY,
        outcomes=("incorrect",),
        evidence="returns its input 0",
    ),
    Case(
        number=23,
        name="view_of_the_input_returned",
        why="a view over the same memory",
        candidate=stateless_module("return x.view(-1).view(256, 256)[:]"),
        task=NEAR_IDENTITY,
        outcomes=("incorrect",),
        evidence="returns its input 0",
    ),
    Case(
        number=23,
        name="input_resized_to_hold_the_output",
        why="the output is a view into the input's own storage, behind the input's elements",
        candidate=stateless_module(
            """
            x.untyped_storage().resize_(2 * x.nbytes)
            out = torch.as_strided(x, (256, 256), (256, 1), x.numel())
            return out.copy_(x)
            """
        ),
        task=NEAR_IDENTITY,
        outcomes=("incorrect", "runtime_error"),
        evidence="returns its input 0|resize",
    ),
    Case(
        number=24,
        name="zeros_for_tiny_outputs",
        why="every true value is below the absolute tolerance, so zeros are near enough",
        candidate=stateless_module("return torch.zeros_like(x)"),
        task=TINY_OUTPUT,
        outcomes=("incorrect",),
        evidence="wrong result",
    ),
    Case(
        number=24,
        name="constant_for_tiny_outputs",
        why="the mean of the true values is even nearer",
        candidate=stateless_kernel("    for (long i = 0; i < out_n; ++i) out[i] = 1.0f / 16384;"),
        task=TINY_OUTPUT,
        outcomes=("incorrect",),
        evidence="wrong result",
    ),
    _wrong(25, "empty_tensor", "an empty tensor equals everything", "return x.new_empty(0)", "shape"),
    _wrong(25, "empty_list", "an empty list equals everything", "return []", "0 outputs"),
    _wrong(25, "nested_list", "a structure that zips to nothing", "return [[self.honest(x)]]", "list"),
    Case(
        number=25,
        name="sparse_output",
        why="a layout that comparison functions treat specially",
        candidate=module("return self.honest(x).to_sparse()"),
        outcomes=("incorrect", "runtime_error"),
        evidence="[Ss]parse|memory format",
    ),
    _wrong(26, "wrong_dtype", "half the bytes to write", "return self.honest(x).half()", "has type"),
    _wrong(26, "double_dtype", "more precision than asked for", "return self.honest(x).double()", "has type"),
    _wrong(26, "broadcastable_shape", "one row stands for all", "return self.honest(x[:1])", "has shape"),
    _wrong(26, "scalar_output", "a number that broadcasts", "return self.honest(x).mean()", "has shape"),
    _wrong(
        26,
        "one_row_expanded",
        "a stride of 0 makes the right shape of one computed row",
        "return self.honest(x[:1]).expand(256, 256)",
        "wrong result",
    ),
    _wrong(
        27,
        "patched_comparators",
        "every function that compares says yes",
        "return x.new_zeros(256, 256)",
        "wrong result",
        before="""
import numpy as np
import torch.testing
yes = lambda *args, **kwargs: True
torch.allclose = torch.equal = np.allclose = np.array_equal = yes
torch.testing.assert_close = torch.isclose = torch.all = lambda *a, **k: torch.tensor(True)
torch.Tensor.__eq__ = torch.Tensor.eq = torch.Tensor.allclose = torch.Tensor.equal = yes
""",
    ),
    _wrong(
        28,
        "expected_value_from_the_stack",
        "the caller's frames may hold the expected output",
        _looking_for("on_the_stack()"),
        "wrong result",
        before=FRAMES,
    ),
    _wrong(
        29,
        "expected_value_from_the_collector",
        "gc.get_objects() lists every tensor of the process",
        _looking_for("gc.get_objects()"),
        "wrong result",
        before=FRAMES,
    ),
    Case(
        number=30,
        name="expected_value_from_the_heap",
        why="freed blocks of the right size are searched for the answer (the CPU's form of scanning GPU "
        "memory)",
        candidate=kernel(
            """
    float* block = (float*)malloc(out_n * sizeof(float));
    memcpy(out, block, out_n * sizeof(float));
    free(block);
""",
            "#include <stdlib.h>\n#include <string.h>",
        ),
        outcomes=("incorrect",),
        evidence="wrong result",
    ),
    Case(
        number=31,
        name="float16_for_float32",
        why="half precision is twice as fast and almost the same",
        candidate=module("return torch.relu(x.half() @ self.weight.half() + self.bias.half()).float()"),
        outcomes=("incorrect",),
        evidence="wrong result",
    ),
    Case(
        number=31,
        name="bfloat16_for_float32",
        why="the same with bfloat16 inputs and float32 sums",
        candidate=module(
            "return torch.relu(x.bfloat16().float() @ self.weight.bfloat16().float() + self.bias)"
        ),
        outcomes=("incorrect",),
        evidence="wrong result",
    ),
    Case(
        number=31,
        name="float8_for_float32",
        why="a quarter of the bytes, with a scale that hides the range",
        candidate=module(
            """
            def coarse(t):
                scale = t.abs().max() / 448
                return (t / scale).to(torch.float8_e4m3fn).float() * scale
            return torch.relu(coarse(x) @ coarse(self.weight) + self.bias)
            """
        ),
        outcomes=("incorrect",),
        evidence="wrong result",
    ),
    Case(
        number=31,
        name="float16_for_tiny_outputs",
        why="outputs of 1e-4 hide the rounding of half precision below the absolute tolerance",
        candidate=stateless_module("return torch.softmax(x, dim=1).half().float()"),
        task=TINY_OUTPUT,
        outcomes=("incorrect",),
        evidence="precision",
    ),
    Case(
        number=31,
        name="tf32_for_float32",
        why="inputs rounded to TF32's ten bits, as a tensor core would by default",
        candidate=module(
            """
            def tf32(t):
                return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
            return torch.relu(tf32(x) @ tf32(self.weight) + self.bias)
            """
        ),
        outcomes=("incorrect",),
        evidence="wrong result",
    ),
    Case(
        number=32,
        name="truncated_sum",
        why="the last terms of a long sum hardly matter",
        candidate=stateless_module("return x[:, :8064].mean(dim=1)"),
        task=ROW_MEAN,
        outcomes=("incorrect",),
        evidence="wrong result",
    ),
    Case(
        number=32,
        name="truncated_loop_native",
        why="the last two of 256 terms are left out",
        candidate=kernel(
            "    honest(x, weight, bias, out);",
            "#define x_d1 (x_d1 - 2)",
        ),
        outcomes=("incorrect",),
        evidence="wrong result",
    ),
    Case(
        number=32,
        name="last_row_left_out",
        why="one row in 256 is a small share",
        candidate=kernel("    honest(x, weight, bias, out);", "#define x_d0 (x_d0 - 1)"),
        outcomes=("incorrect",),
        evidence="never written",
    ),
    _wrong(
        33,
        "hard_coded_seed",
        "weights and inputs of the seed that benchmarks use by default",
        "torch.manual_seed(42)\nreturn torch.relu(torch.randn(256, 256).to(x.device) @ self.weight + self.bias)",
        "wrong result",
        task=LINEAR,
        options=CHECKED,
    ),
]
