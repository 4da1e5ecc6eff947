"""Payloads in shared memory: what crosses is right and stands still; what a liar sends is refused and closed."""

import errno
import fcntl
import gc
import json
import os
import resource
import socket

import pytest
import torch

from sandbox.jail import bulk
from sandbox.jail.frames import MAGIC, PREFIX, Channel, FrameError
from sandbox.jail.tensors import pack, unpack
from tests.sandbox.helpers import open_descriptors

SIZE = 64 << 10
LIMIT_BYTES = 1 << 24


@pytest.fixture(autouse=True)
def small_payloads_count_as_large(monkeypatch):
    monkeypatch.setattr(bulk, "MIN_BYTES", 4096)


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()


def exchange(left: Channel, right: Channel, tensors, fds=()):
    entries, buffers = pack(tensors)
    left.send({"tensors": entries}, buffers, fds)
    message = right.receive(LIMIT_BYTES)
    return message, unpack(message.header["tensors"], message.buffers)


def sealed(size=SIZE, seals=bulk.SEALS, written=None, flags=0) -> int:
    """A memfd of `size` bytes, the first `written` of which (all if None) are there."""
    fd = os.memfd_create("payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    if not flags:
        os.write(fd, bytes(size if written is None else written))
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def forge(sock, fds, *, size=SIZE, in_memory=True, more=b""):
    """Sends a message as a liar would; closes `fds`."""
    header = {"nonce": "n", "sequence": 0, "sizes": [size], "bulk": in_memory}
    text = json.dumps(header).encode()
    try:
        data = PREFIX.pack(MAGIC, len(text), size) + text + more
        socket.send_fds(sock, [data], fds) if fds else sock.sendall(data)
    finally:
        for fd in fds:
            os.close(fd)


def test_payloads_cross_both_ways_in_shared_memory(pair):
    left, right = Channel(pair[0], "n"), Channel(pair[1], "n")
    tensors = [torch.rand(77, 1001), torch.empty(0), torch.arange(5), torch.rand(4096).to(torch.bfloat16)]
    for sender, receiver in ((left, right), (right, left)):
        message, got = exchange(sender, receiver, tensors)
        assert message.header["bulk"] is True and receiver._mappings.held_bytes
        for one, other in zip(got, tensors, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
            assert one.data_ptr() % 64 == 0 or not one.numel()


def test_a_small_payload_stays_in_the_stream(pair):
    message, (got,) = exchange(Channel(pair[0], "n"), Channel(pair[1], "n"), [torch.arange(10)])
    assert message.header["bulk"] is False and got.tolist() == list(range(10))


def test_received_tensors_can_be_written_and_belong_to_the_receiver(pair):
    left, right = Channel(pair[0], "n"), Channel(pair[1], "n")
    sent = torch.zeros(SIZE)
    _, (first,) = exchange(left, right, [sent])
    sent += 1
    first[:100] += 7
    assert first.sum() == 700
    _, (second,) = exchange(left, right, [sent])
    assert second.sum() == SIZE and first.sum() == 700


def test_memory_is_unmapped_with_the_last_tensor_over_it(pair):
    left, right = Channel(pair[0], "n"), Channel(pair[1], "n")
    before = open_descriptors()
    message, tensors = exchange(left, right, [torch.ones(SIZE), torch.ones(SIZE)])
    assert open_descriptors() == before and "memfd:payload" in open("/proc/self/maps").read()
    kept = tensors[1][5:]
    del message, tensors
    gc.collect()
    assert right._mappings.held_bytes and kept.sum() == SIZE - 5
    del kept
    gc.collect()
    assert right._mappings.held_bytes == 0 and "memfd:payload" not in open("/proc/self/maps").read()


def test_no_more_than_a_bound_of_the_peer_s_memory_stays_mapped(pair):
    left, right = Channel(pair[0], "n"), Channel(pair[1], "n", max_held_bytes=10 * SIZE)
    kept = [exchange(left, right, [torch.full((SIZE,), n)])[1][0] for n in range(4)]  # 8 * SIZE bytes each
    assert right._mappings.held_bytes == 8 * SIZE
    assert [tensor.unique().tolist() for tensor in kept] == [[0], [1], [2], [3]]
    kept[3] += 1
    assert kept[3].unique().tolist() == [4]


def test_a_sender_has_a_bound_of_its_own(pair):
    left, right = Channel(pair[0], "n", max_bulk_bytes=SIZE), Channel(pair[1], "n")
    assert exchange(left, right, [torch.zeros(SIZE, dtype=torch.uint8)])[0].header["bulk"] is True
    assert exchange(left, right, [torch.zeros(SIZE + 1, dtype=torch.uint8)])[0].header["bulk"] is False


def test_other_descriptors_travel_beside_the_payload_s(pair):
    left, right = Channel(pair[0], "n"), Channel(pair[1], "n", max_fds=2)
    read_end, write_end = os.pipe()
    message, (got,) = exchange(left, right, [torch.ones(SIZE)], [read_end])
    (received,) = message.fds
    os.write(write_end, b"hello")
    assert os.read(received, 5) == b"hello" and got.sum() == SIZE
    for fd in (read_end, write_end, received):
        os.close(fd)


def ordinary_file() -> int:
    fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    os.write(fd, bytes(SIZE))
    return fd


def pipe() -> int:
    read_end, write_end = os.pipe()
    os.close(write_end)
    return read_end


def file_of_shared_memory() -> int:
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    os.write(fd, bytes(SIZE))
    return fd


def huge_pages() -> int:
    return sealed(2 << 20, flags=os.MFD_HUGETLB)


def reopened(flags: int) -> int:
    fd = sealed()
    try:
        return os.open(f"/proc/self/fd/{fd}", flags)
    finally:
        os.close(fd)


LIES = {
    "no seals": lambda: sealed(seals=0),
    **{f"without seal {seal}": lambda seal=seal: sealed(seals=bulk.SEALS & ~seal) for seal in (1, 2, 4, 8)},
    "too small": lambda: sealed(SIZE - 64),
    "too large": lambda: sealed(SIZE + 64),
    "empty": lambda: sealed(0),
    "a hole": lambda: sealed(written=SIZE // 2),
    "ordinary file": ordinary_file,
    "file of shared memory": file_of_shared_memory,
    "pipe": pipe,
    "directory": lambda: os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY),
    "device": lambda: os.open("/dev/zero", os.O_RDWR),
    "socket": lambda: socket.socket(socket.AF_UNIX).detach(),
    "path": lambda: reopened(os.O_PATH),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_not_sealed_memory_of_the_announced_size_is_refused(pair, lie):
    forge(pair[0], [LIES[lie]()])
    before = open_descriptors()
    with pytest.raises(FrameError, match="memory is refused"):
        Channel(pair[1], "n").receive(LIMIT_BYTES)
    assert open_descriptors() == before


def test_memory_that_cannot_be_read_is_refused(pair):
    fd = os.memfd_create("payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(SIZE))
    writing = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, bulk.SEALS)
    os.close(fd)
    forge(pair[0], [writing])
    with pytest.raises(FrameError, match="cannot be read"):
        Channel(pair[1], "n").receive(LIMIT_BYTES)


def test_huge_pages_are_refused(pair):
    try:
        fd = huge_pages()
    except OSError as error:
        pytest.skip(f"no huge pages here: {error}")
    forge(pair[0], [fd], size=2 << 20)
    with pytest.raises(FrameError, match="another kind"):
        Channel(pair[1], "n").receive(LIMIT_BYTES)


def test_sealed_memory_cannot_be_truncated_or_written_after_it_was_sent(pair):
    fd = sealed()
    left = os.dup(fd)
    forge(pair[0], [fd])
    for change in (lambda: os.ftruncate(left, 0), lambda: os.pwrite(left, b"x", 0)):
        with pytest.raises(PermissionError):
            change()
    message = Channel(pair[1], "n").receive(LIMIT_BYTES)
    assert bytes(message.buffers[0]) == bytes(SIZE)
    os.close(left)


def test_memory_that_is_truncated_after_it_was_sent_is_refused(pair):
    fd = sealed(seals=0)
    left = os.dup(fd)
    forge(pair[0], [fd])
    os.ftruncate(left, 0)
    with pytest.raises(FrameError, match="not sealed"):
        Channel(pair[1], "n").receive(LIMIT_BYTES)
    os.close(left)


def test_a_payload_larger_than_expected_is_refused_before_it_is_looked_at(pair):
    forge(pair[0], [sealed()])
    before = open_descriptors()
    with pytest.raises(FrameError, match="at most"):
        Channel(pair[1], "n").receive(SIZE - 1)
    assert open_descriptors() == before


@pytest.mark.parametrize("count", [0, 2, 3, 50])
@pytest.mark.parametrize("max_fds", [0, 1])
def test_the_number_of_descriptors_is_what_the_message_announces(pair, count, max_fds):
    forge(pair[0], [sealed() for _ in range(count)])
    before = open_descriptors()
    channel = Channel(pair[1], "n", max_fds=max_fds)
    if 1 <= count <= 1 + max_fds:
        for fd in channel.receive(LIMIT_BYTES).fds:
            os.close(fd)
    else:
        with pytest.raises(FrameError, match="descriptors"):
            channel.receive(LIMIT_BYTES)
    assert open_descriptors() == before


def test_a_descriptor_with_a_message_that_announces_none_is_refused(pair):
    before = open_descriptors()
    forge(pair[0], [sealed()], size=0, in_memory=False)
    with pytest.raises(FrameError, match="descriptors"):
        Channel(pair[1], "n").receive(LIMIT_BYTES)
    assert open_descriptors() == before


def test_a_descriptor_with_a_later_part_of_a_message_is_refused(pair):
    before = open_descriptors()
    forge(pair[0], [], in_memory=False)
    fd = sealed()
    socket.send_fds(pair[0], [bytes(SIZE)], [fd])
    os.close(fd)
    with pytest.raises(FrameError, match="nobody expects"):
        Channel(pair[1], "n").receive(LIMIT_BYTES)
    assert open_descriptors() == before


def test_a_payload_of_nothing_cannot_be_in_memory(pair):
    forge(pair[0], [sealed(0)], size=0)
    with pytest.raises(FrameError, match="descriptors"):
        Channel(pair[1], "n").receive(LIMIT_BYTES)


def test_many_good_and_bad_messages_leave_no_descriptor(pair):
    left, right = Channel(pair[0], "n"), Channel(pair[1], "n")
    before = open_descriptors()
    kept = [exchange(left, right, [torch.full((SIZE,), 1)])[1] for _ in range(30)]
    for lie in LIES.values():
        ours, theirs = socket.socketpair()
        forge(ours, [lie(), sealed()])
        with pytest.raises(FrameError):
            Channel(theirs, "n", max_fds=1).receive(LIMIT_BYTES)
        ours.close()
        theirs.close()
    assert open_descriptors() == before and len(kept) == 30


@pytest.mark.parametrize("failing", ["memfd_create", "pwrite", "ftruncate"])
@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EFBIG, errno.ENOMEM])
def test_without_shared_memory_the_stream_carries_the_payload(pair, monkeypatch, failing, code):
    left, right = Channel(pair[0], "n"), Channel(pair[1], "n")

    def fails(*_):
        raise OSError(code, os.strerror(code))

    before = open_descriptors()
    monkeypatch.setattr(os, failing, fails)
    message, (got,) = exchange(left, right, [torch.ones(SIZE // 4)])
    assert message.header["bulk"] is False and got.sum() == SIZE // 4
    assert open_descriptors() == before


def test_a_limit_on_the_size_of_files_sends_the_payload_through_the_stream(pair):
    left, right = Channel(pair[0], "n"), Channel(pair[1], "n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, limits[1]))
    try:
        message, (got,) = exchange(left, right, [torch.ones(SIZE // 4)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert message.header["bulk"] is False and got.sum() == SIZE // 4
