"""A machine without a GPU can say whether Triton kernels compile for one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.build.triton import CompileReport, KernelBuild, capability_of

KERNELS = Path(__file__).parents[1] / "gpu" / "kernels"

SCRIPT = """
import json, sys
import torch
from sandbox.build import triton
from sandbox.build.triton import aot_compile
for order in json.load(sys.stdin):
    triton._SHARED_LIMIT_BYTES["sm_90"] = order["shared_bytes"]
    args = [torch.randn(shape) for shape in order["shapes"]]
    report = aot_compile(order["source"], order["arch"], init=order["init"], args=args)
    print(json.dumps(report.to_json()), flush=True)
"""


def compile_all(*orders):
    orders = [{"arch": "sm_90", "init": [], "shared_bytes": 227 << 10, **order} for order in orders]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=json.dumps(orders), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [CompileReport.from_json(json.loads(line)) for line in done.stdout.splitlines()]


def candidate(name, *shapes, change=("", ""), **rest):
    return {"source": (KERNELS / name).read_text().replace(*change), "shapes": shapes, **rest}


def test_kernels_are_compiled_as_a_launch_would_compile_them():
    add, chain, broken, plain = compile_all(
        candidate("add_triton.py", (64, 64), (64, 64)),
        candidate("chain_triton.py", (64, 2048), init=[2048]),
        candidate("add_triton.py", (64, 64), (64, 64), change=("tl.load(x_ptr", "tl.lod(x_ptr")),
        candidate("add_torch_only.py", (8,), (8,)),
    )
    assert add.compiles and add.summary() == "compiles for sm_90: yes (1 kernel)"
    assert [(build.kernel, build.num_warps) for build in add.builds] == [("add_kernel", 4)]

    # All configurations of an autotuner are compiled, each with its own number of warps.
    assert {build.num_warps for build in chain.builds if build.tuning} == {4, 8}
    assert chain.compiles

    assert broken.compiles is False
    assert "kernel add_kernel" in broken.summary() and "lod" in broken.summary()

    assert plain.compiles is None
    assert plain.summary() == "compiles for sm_90: unknown, no kernel was launched"


FAILING_FIRST = """
import torch, triton, triton.language as tl

@triton.jit
def bad(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), undefined_name)

@triton.jit
def good(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 1.0)

class ModelNew:
    def __call__(self, x):
        bad[(1,)](x, BLOCK=16)
        good[(1,)](x, BLOCK=16)
        assert x.is_cuda, "needs a GPU"
"""


def test_a_kernel_that_fails_does_not_hide_the_ones_after_it():
    (report,) = compile_all({"source": FAILING_FIRST, "shapes": [(16,)]})
    assert report.kernels == ("bad", "good")
    assert "undefined_name" in report.error("bad")
    assert report.error("good") == ""
    assert "needs a GPU" in report.stopped


def test_a_kernel_that_needs_more_shared_memory_than_a_block_may_use_does_not_count_as_compiled():
    fits, exceeds = compile_all(
        candidate("softmax_triton.py", (16, 1000)), candidate("softmax_triton.py", (16, 1000), shared_bytes=8)
    )
    assert fits.compiles
    assert exceeds.compiles is False
    assert "shared memory" in exceeds.error("softmax_kernel")


def test_an_autotuned_kernel_compiles_if_one_configuration_does():
    builds = (KernelBuild(kernel="k", tuning=True, error="too large"), KernelBuild(kernel="k", tuning=True))
    assert CompileReport(arch="sm_90", builds=builds).compiles
    assert not CompileReport(arch="sm_90", builds=builds[:1]).compiles


@pytest.mark.parametrize(("arch", "capability"), [("sm_90", 90), ("sm_90a", 90), ("sm_120", 120)])
def test_an_architecture_is_named_as_the_compiler_names_it(arch, capability):
    assert capability_of(arch) == capability


@pytest.mark.parametrize("arch", ["90", "h100", "sm_", "sm_9", "compute_90"])
def test_another_name_of_an_architecture_is_an_error(arch):
    with pytest.raises(ValueError, match="sm_90"):
        capability_of(arch)
