"""What makes judging cheap must change no verdict: the lean prelude, the quick link, huge pages, seeds, sums that tell of NaN."""

import ctypes
import os

import pytest
import torch

from sandbox.build.artifacts import ArtifactStore
from sandbox.build.cpp import LEAN_PRELUDE, USES_LIBRARY, build_kernel
from sandbox.build.signature import INCLUDES, make_signature
from sandbox.jail import pages
from sandbox.jail.execution import seed_torch
from sandbox.jail.runner import _same
from sandbox.jail.spawn import Zygote
from sandbox.verdict.correctness import Tolerance, all_finite, compare, has_nan

F32 = {"dtype": "float32", "shape": [4]}
HEAD = 'extern "C" void kernel(const float* x, float* out)'


@pytest.fixture
def build(tmp_path):
    zygote = Zygote(modules=[], threads=1, directory=tmp_path)
    signature = make_signature(["x"], [F32], [], [F32], False)
    store = ArtifactStore(tmp_path / "store")

    def run(source):
        built = build_kernel(source, signature, store=store, zygote=zygote, scratch=tmp_path, timeout_s=60.0)
        x, out = torch.tensor([0.5, 1.0, 2.0, 3.0]), torch.empty(4)
        ctypes.CDLL(str(built.path)).kernel(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()))
        return out

    yield run
    zygote.close()


@pytest.mark.parametrize(
    "before, value, expected",
    [
        ("", "std::beta(x[i], 2.0f)", lambda x: 1 / (x * (x + 1))),
        ("", "std::max(x[i], 1.5f)", lambda x: x.clamp_min(1.5)),
        ("#include <vector>\n#include <algorithm>\n", "*std::max_element(x, x + i + 1)", lambda x: x),
        ("", "fabs(abs(-x[i]))", lambda x: x),
    ],
    ids=["special function", "template of the standard library", "header", "overload"],
)
def test_everything_that_the_includes_declare_can_be_used(build, before, value, expected):
    out = build(f"{before}{HEAD} {{ for (long i = 0; i < out_n; ++i) out[i] = {value}; }}")
    torch.testing.assert_close(out, expected(torch.tensor([0.5, 1.0, 2.0, 3.0])))


def test_what_needs_the_cpp_library_is_linked_with_it(build):
    source = '#include <string>\n#include <sstream>\n' + HEAD + (
        " { std::ostringstream s; s << out_n; for (long i = 0; i < out_n; ++i) out[i] = std::stof(s.str()); }"
    )
    assert build(source).tolist() == [4.0] * 4


@pytest.mark.parametrize("source", ["std::beta(1, 2)", "#include <cmath>", "st\\\nd::beta(1, 2)", "st ## d", "st %:%: d", "using namespace std;"])
def test_sources_that_may_use_special_functions_get_the_whole_prelude(source):
    assert USES_LIBRARY.search(source)


def test_the_lean_prelude_adds_to_the_includes_and_takes_none_away():
    assert "#include <math.h>" in INCLUDES and "math.h" not in LEAN_PRELUDE
    assert not USES_LIBRARY.search(HEAD + " { beta = expf(x[i]) / (1.0f + sqrtf(y)); }")


def test_memory_on_huge_pages_is_as_it_was_in_parent_and_child():
    block = bytearray(os.urandom(1 << 20)) * 16
    before = hash(bytes(block))
    assert pages.collapse_memory() >= 0
    child = os.fork()
    if child == 0:
        block[::4096] = bytes(len(block[::4096]))
        os._exit(int(hash(bytes(block)) == before))
    assert os.waitpid(child, 0)[1] == 0
    assert hash(bytes(block)) == before


def test_seeding_for_a_cpu_gives_what_pytorch_s_own_seeding_gives():
    torch.manual_seed(123)
    expected = torch.randn(5)
    seed_torch(123, "cpu")
    assert torch.equal(torch.randn(5), expected)


@pytest.mark.parametrize("shape", [(4,), (3,), (5, 7), (0,), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float64])
def test_a_changed_bit_is_seen_whatever_the_size(shape, dtype):
    tensor = torch.ones(shape, dtype=dtype)
    assert _same(tensor, tensor.clone())
    if tensor.numel():
        other = tensor.clone()
        other.view(-1)[-1] = 2
        assert not _same(tensor, other)
    wide = torch.arange(20.0)
    assert _same(wide[1:9], wide[1:9].clone()) and not _same(wide[1:9], wide[2:10])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int64, torch.bool])
def test_sums_tell_of_nan_and_infinity_only_where_there_is_one(dtype):
    plain = torch.ones(1000, dtype=dtype)
    assert all_finite(plain) and not has_nan(plain)
    if dtype.is_floating_point:
        large = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
        assert all_finite(large) and not has_nan(large)
        for bad, nan in (([torch.inf], False), ([torch.inf, -torch.inf], False), ([torch.nan], True)):
            tensor = plain.clone()
            tensor[: len(bad)] = torch.tensor(bad)
            assert not all_finite(tensor) and has_nan(tensor) == nan


def test_a_single_wrong_element_of_the_last_piece_is_found():
    want = torch.randn(3 * (1 << 18) + 17)
    have = want.clone()
    assert compare([want], [have], Tolerance()).ok
    have[-1] += 2e-3
    trial = compare([want], [have], Tolerance())
    assert not trial.ok and "differs" in trial.reason
    have[-1] = torch.nan
    assert not compare([want], [have], Tolerance()).ok
