"""Payloads in shared memory between an oracle and its jails: every level, limits, lies, whose memory it is."""

import pytest
import torch

from sandbox.jail import bulk
from sandbox.jail.faults import JailDied
from sandbox.jail.limits import Limits
from sandbox.jail.spawn import Zygote
from sandbox.jail.tensors import pack, unpack
from tests.sandbox.helpers import open_descriptors
from tests.sandbox.levels import offered_or_skip

LIMIT_BYTES = 1 << 24
COUNTING = """
import torch
class Model(torch.nn.Module):
    def forward(self, x): return x + 1
def get_inputs(): return [torch.arange(4 << 20, dtype=torch.float32)]
def get_init_inputs(): return []
"""
FORGING = """
import json, os, socket
def hostile(fds):
    channel = next(o for o in __import__("gc").get_objects() if type(o).__name__ == "Channel")
    text = json.dumps({"ok": True, "nonce": channel._nonce, "sequence": channel._sequence, "sizes": [4096],
                       "bulk": True}).encode()
    socket.send_fds(channel._sock, [b"DKF1" + len(text).to_bytes(4) + (4096).to_bytes(8) + text], fds)
"""
LIMITS = Limits(memory_bytes=1 << 30)


@pytest.fixture(scope="module")
def zygotes(tmp_path_factory):
    """Makes the zygote of a level on demand."""
    made = {}

    def make(level) -> Zygote:
        offered_or_skip(level)
        if level not in made:
            directory = tmp_path_factory.mktemp(level)
            made[level] = Zygote(modules=["torch"], threads=1, directory=directory, level=level)
        return made[level]

    yield make
    for zygote in made.values():
        zygote.close()


def load(runner, source):
    return runner.call(
        "load_reference", 20.0, source=source, entry_point="Model", dtype="float32", device="cpu", seed=1
    )


@pytest.mark.parametrize("level", ["strict", "standard", "none"])
def test_runners_of_every_level_send_and_take_shared_memory(zygotes, level):
    before = open_descriptors()
    with zygotes(level).runner(LIMITS, 1 << 30) as runner:
        load(runner, COUNTING)
        drawn = runner.call("inputs", 20.0, seed=1, slot=0, reply_bytes=LIMIT_BYTES)
        (inputs,) = unpack(drawn.header["tensors"], drawn.buffers)
        assert drawn.header["bulk"] is True
        inputs *= 2
        entries, buffers = pack([inputs])
        runner.call("set_inputs", 20.0, buffers, slot=1, args=drawn.header["args"], tensors=entries)
        order = {"slot": 1, "seed": 1, "check": True, "max_bytes": LIMIT_BYTES}
        reply = runner.call("run", 20.0, reply_bytes=LIMIT_BYTES, **order)
        (outputs,) = unpack(reply.header["tensors"], reply.buffers)
        assert reply.header["bulk"] is True and reply.header["changed"] == []
        assert torch.equal(outputs, 2 * torch.arange(4 << 20) + 1)
    assert outputs[-1] == 2 * ((4 << 20) - 1) + 1, "what a runner has sent outlives it"
    assert open_descriptors() <= before + 4  # the zygote's own, where it is made here


@pytest.mark.parametrize("level", ["strict", "standard", "none"])
def test_a_runner_without_leave_for_large_files_answers_through_the_stream(zygotes, level):
    with zygotes(level).runner(Limits(memory_bytes=1 << 30, file_bytes=1 << 20), 1 << 30) as runner:
        load(runner, COUNTING)
        drawn = runner.call("inputs", 20.0, seed=1, slot=0, reply_bytes=LIMIT_BYTES)
        assert drawn.header["bulk"] is False
        assert torch.equal(*unpack(drawn.header["tensors"], drawn.buffers), torch.arange(4.0 * (1 << 20)))


@pytest.mark.parametrize(
    "attack",
    [
        "hostile([])",
        "fd = os.memfd_create('x'); os.write(fd, bytes(4096)); hostile([fd])",
        "hostile([os.open('/dev/zero', os.O_RDONLY)])",
        "hostile(list(os.pipe()))",
        "hostile([os.memfd_create(str(n)) for n in range(100)])",
    ],
)
def test_a_runner_that_lies_about_its_payload_ends_its_conversation(zygotes, attack):
    zygote = zygotes("none")
    before = open_descriptors()
    with zygote.runner(LIMITS, 1 << 30) as runner, pytest.raises(JailDied, match="conversation"):
        load(runner, COUNTING + FORGING + attack)
    assert open_descriptors() == before


def test_memory_that_a_jail_has_sent_does_not_count_against_it_beyond_a_bound(zygotes):
    """Many payloads are kept outside, far more together than the jail may use. (Its own memory settles anywhere from 120
    to 300 MiB: the C library's allocator leaves holes between aligned blocks of 16 MiB.)"""
    allowed_bytes = 512 << 20
    with zygotes("none").runner(LIMITS, allowed_bytes) as runner:
        load(runner, COUNTING)
        kept = []
        for seed in range(60):
            drawn = runner.call("inputs", 20.0, seed=seed, slot=0, reply_bytes=LIMIT_BYTES)
            kept += unpack(drawn.header["tensors"], drawn.buffers)
        assert sum(tensor.nbytes for tensor in kept) > 1.5 * allowed_bytes
        assert runner._channel._mappings.held_bytes <= bulk.MAX_JAIL_BYTES
        assert all(torch.equal(tensor, kept[0]) for tensor in kept)
