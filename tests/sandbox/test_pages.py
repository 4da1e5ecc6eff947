"""What a call costs does not depend on what its process has freed before."""

import pytest
import torch

from sandbox.jail.limits import Limits
from sandbox.jail.pages import HUGE_BYTES, SETTLED_BYTES, settled_copy
from sandbox.jail.processes import members
from sandbox.jail.spawn import Zygote
from sandbox.jail.tensors import pack

SCALING = """
import torch
class Model(torch.nn.Module):
    def forward(self, x): return x * 1.0
def get_inputs(): return [torch.randn(512, 1024)]
def get_init_inputs(): return []
"""
OUTPUT_PAGES = 512
CALLS = 50


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    zygote = Zygote(modules=["torch"], threads=1, directory=tmp_path_factory.mktemp("pages"), level="none")
    yield zygote
    zygote.close()


def faults(pid: int) -> int:
    """Page faults so far of a jail's processes that needed no disk."""
    total = 0
    for member in members(pid):
        with open(f"/proc/{member}/stat") as file:
            total += int(file.read().rsplit(")", 1)[1].split()[7])
    return total


def test_the_outputs_of_a_new_process_s_calls_are_memory_that_it_has_already(zygote):
    with zygote.runner(Limits(memory_bytes=1 << 30), 1 << 30) as runner:
        order = {"source": SCALING, "entry_point": "Model", "dtype": "float32", "device": "cpu", "language": "cpp"}
        runner.call("load_module", 20.0, seed=1, init=[], tensors=[], **order)
        for slot in range(3):
            entries, buffers = pack([torch.randn(512, 1024)])
            runner.call("set_inputs", 20.0, buffers, slot=slot, args=[{"tensor": 0}], tensors=entries)
            runner.call("run", 20.0, slot=slot, seed=1, check=True, max_bytes=1 << 24, reply_bytes=1 << 24)
        block = {"slots": [0, 1, 2], "flush": True, "which": "eager"}
        runner.call("time_block", 20.0, calls=CALLS, keep=3, **block)  # what it has then, it keeps
        before = faults(runner.pid)
        for keep in range(5):
            runner.call("time_block", 20.0, calls=CALLS, keep=keep, **block)
        a_call = (faults(runner.pid) - before) / (5 * CALLS)
    assert a_call < OUTPUT_PAGES / 10, f"{a_call:.0f} page faults a call"


def is_private(address: int) -> bool:
    """Whether memory is this process's alone: what processes share is never on huge pages, unless the kernel is told so."""
    with open("/proc/self/maps") as file:
        for line in file:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            if first <= address < last:
                return line.split()[1].endswith("p")
    return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_large_inputs_lie_on_pages_of_their_own(dtype):
    for shape in ((2048, 1024), (3, 700, 501)):
        tensor = torch.randn(shape).to(dtype)
        copy, other = settled_copy(tensor), settled_copy(tensor)
        assert torch.equal(copy, tensor) and copy.shape == tensor.shape and copy.dtype == dtype and copy.is_contiguous()
        assert is_private(copy.data_ptr())
        assert copy.data_ptr() % HUGE_BYTES == 0 and abs(copy.data_ptr() - other.data_ptr()) >= HUGE_BYTES
        copy.zero_()
        assert torch.equal(other, tensor)


def test_small_and_strided_tensors_are_cloned():
    small, strided = torch.randn(SETTLED_BYTES // 4 - 1), torch.randn(700, 900).t()
    for tensor in (small, strided, torch.empty(0), torch.tensor(3.0)):
        copy = settled_copy(tensor)
        assert torch.equal(copy, tensor) and copy.stride() == tensor.stride() and copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
