"""Frames, runners and their zygote: what crosses the line, and what survives a kill."""

import os
import socket
import time

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sandbox.jail.capture import Capture
from sandbox.jail.faults import JailDied, JailMemory, JailReply, JailTimeout
from sandbox.jail.frames import MAGIC, PREFIX, Channel, ChannelClosed, FrameError, Message
from sandbox.jail.jailed import MAX_REQUESTS_AN_ORDER
from sandbox.jail.limits import Limits
from sandbox.jail.spawn import Zygote
from sandbox.jail.tensors import DTYPES, decode, encode, pack, unpack
from sandbox.jail.view import PRIVATE
from tests.sandbox.helpers import ADD_BIAS, eventually

LIMITS = Limits(memory_bytes=1 << 30)


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    zygote = Zygote(modules=["torch"], threads=1, directory=tmp_path_factory.mktemp("zygote"))
    yield zygote
    zygote.close()


@pytest.fixture
def runner(zygote):
    with zygote.runner(LIMITS, 1 << 30) as runner:
        yield runner


def load(runner, source, timeout_s=20.0):
    return runner.call(
        "load_reference", timeout_s, source=source, entry_point="Model", dtype="float32", device="cpu", seed=1
    )


@pytest.mark.parametrize("dtype", list(DTYPES.values()))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 5)])
def test_tensors_of_every_type_and_shape_cross(pair, dtype, shape):
    tensor = (torch.rand(shape) * 100).to(dtype)
    entries, buffers = pack([tensor, tensor.clone()])
    Channel(pair[0], "n").send({"tensors": entries}, buffers)
    message = Channel(pair[1], "n").receive(1 << 20)
    got = unpack(message.header["tensors"], message.buffers)
    assert len(got) == 2 and got[1].dtype == dtype and got[1].shape == tensor.shape
    assert torch.equal(got[1], tensor)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=10,
)


@given(VALUES)
def test_plain_values_survive_encoding(value):
    tensors = []
    assert decode(encode((value, torch.float16), tensors), tensors) == (value, torch.float16)


def test_what_could_run_code_is_not_encoded():
    with pytest.raises(TypeError, match="function"):
        encode([lambda: 0], [])


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        PREFIX.pack(MAGIC, 1 << 31, 0),
        PREFIX.pack(MAGIC, 2, 1 << 40) + b"{}",
        PREFIX.pack(MAGIC, 2, 0) + b"{}",
        PREFIX.pack(MAGIC, 2, 0) + b"[]",
        PREFIX.pack(MAGIC, 3, 0) + b"\xff\xff\xff",
        PREFIX.pack(MAGIC, 100_000, 0) + b"[" * 100_000,
        PREFIX.pack(MAGIC, 51, 0) + b'{"nonce":"n","sequence":0,"sizes":[],"ms":Infinity}',
        PREFIX.pack(MAGIC, 39, 0) + b'{"nonce":"wrong","sequence":0,"sizes":[]}'[:39],
    ],
)
def test_garbage_on_the_channel_is_noticed(pair, data):
    pair[0].sendall(data)
    with pytest.raises(FrameError):
        Channel(pair[1], "n").receive(1 << 20)


def test_a_stranger_s_or_repeated_message_is_noticed(pair):
    Channel(pair[0], "other").send({})
    with pytest.raises(FrameError, match="does not belong"):
        Channel(pair[1], "n").receive(0)
    again = Channel(pair[0], "n")
    again.send({})
    again.send({})
    reader = Channel(pair[1], "n")
    reader.receive(0)
    reader._sequence = 0
    with pytest.raises(FrameError, match="does not belong"):
        reader.receive(0)


def test_a_closed_channel_is_told_from_garbage(pair):
    pair[0].close()
    with pytest.raises(ChannelClosed):
        Channel(pair[1], "n").receive(0)


def test_malformed_tensor_descriptions_are_refused():
    for entries, size in [
        ("x", 0),
        ([{}], 4),
        ([{"dtype": "float32", "shape": [2]}], 4),
        ([{"dtype": "object", "shape": [1]}], 8),
        ([{"dtype": "float32", "shape": [-1]}], 4),
        ([{"dtype": "float32", "shape": [1 << 62, 1 << 62, 0]}], 0),
    ]:
        with pytest.raises(ValueError):
            unpack(entries, [memoryview(bytearray(size))])


def test_a_runner_is_alone_in_a_session_without_privileges_or_descriptors(runner):
    source = ADD_BIAS + (
        "\nimport os\nstatus = open('/proc/self/status').read()\n"
        "descriptors = sorted(os.listdir('/proc/self/fd'))\n"
        "facts = [os.getsid(0) == os.getpid(), 'NoNewPrivs:\\t1' in status, descriptors, os.getcwd()]\n"
        "raise ValueError(facts)\n"
    )
    with pytest.raises(JailReply) as caught:
        load(runner, source)
    text = str(caught.value)
    assert "[True, True, ['0', '1', '2', '3', '4']" in text, text
    assert (PRIVATE if runner.zygote.level == "strict" else str(runner.directory)) in text


def test_a_runner_s_environment_holds_no_secret(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "do-not-tell")
    zygote = Zygote(modules=["torch"], threads=1, directory=tmp_path)
    try:
        with zygote.runner(LIMITS, 1 << 30) as runner, pytest.raises(JailReply) as caught:
            load(runner, "import os\nraise ValueError(sorted(os.environ))")
        assert "PATH" in str(caught.value) and "SECRET_TOKEN" not in str(caught.value)
    finally:
        zygote.close()


def test_a_deadline_ends_the_process_and_its_strays(zygote):
    source = (
        "import os, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n    os._exit(0)\n"
        "time.sleep(1000)\n"
    )
    with zygote.runner(LIMITS, 1 << 30) as runner:
        started = time.monotonic()
        with pytest.raises(JailTimeout):
            load(runner, source, timeout_s=0.5)
        assert time.monotonic() - started < 5
        assert runner.exit.signal == 9
    parent = psutil.Process(zygote._process.pid)
    assert eventually(lambda: parent.children(recursive=True) == [])
    assert not runner.directory.exists()


def test_memory_of_a_whole_session_is_watched(zygote):
    source = (
        "import os, time\nfor _ in range(4):\n    if os.fork() == 0: break\n"
        "x = bytearray(os.urandom(1)) * (200 << 20)\ntime.sleep(1000)"
    )
    with zygote.runner(LIMITS, 512 << 20) as runner, pytest.raises(JailMemory, match="512 MiB"):
        load(runner, source, timeout_s=20)


def test_output_is_kept_in_part_only(runner):
    noisy = (
        ADD_BIAS
        + "\nimport os\nfor _ in range(4000): os.write(1, b'x' * 1000)\n"
        + "os.write(2, b'last words')\nos._exit(3)"
    )
    with pytest.raises(JailDied) as caught:
        load(runner, noisy)
    assert (caught.value.exit.code, caught.value.exit.signal) == (3, 0)
    assert caught.value.output.endswith("last words") and len(caught.value.output) <= 2000
    assert len(runner.capture.text()) < 40_000


def test_requests_ahead_of_their_answers_end_the_order(runner, monkeypatch):
    answered = []
    monkeypatch.setattr(runner, "_answer", answered.append)
    monkeypatch.setattr(runner._channel, "receive", lambda reply_bytes: Message({"request": "x"}, []))
    with pytest.raises(JailDied, match="more than 64 requests"):
        runner.call("inputs", 5.0)
    assert len(answered) == MAX_REQUESTS_AN_ORDER


def test_whoever_prints_faster_than_we_read_does_not_hold_us_up(monkeypatch):
    reader, writer = os.pipe()
    capture = Capture(reader)
    monkeypatch.setattr("sandbox.jail.capture.os.read", lambda fd, size: b"x" * size)  # never empty
    capture.drain()
    monkeypatch.undo()
    assert "bytes left out" in capture.text()
    os.close(writer)
    capture.close()


def test_memory_is_watched_over_many_short_orders(zygote):
    with zygote.runner(LIMITS, 1 << 30) as runner:
        load(runner, ADD_BIAS)
        runner.memory_bytes = 1 << 20  # less than it has
        with pytest.raises(JailMemory):
            for _ in range(1000):
                runner.call("inputs", 5.0, seed=1, slot=0, reply_bytes=1 << 26)
                time.sleep(0.001)


def test_a_runner_ends_with_its_oracle(tmp_path):
    zygote = Zygote(modules=["torch"], threads=1, directory=tmp_path)
    runner = zygote.runner(LIMITS, 1 << 30)
    assert psutil.pid_exists(runner.pid)
    zygote._control.close()
    assert eventually(lambda: not psutil.pid_exists(runner.pid))
    os.waitpid(zygote._process.pid, 0)
