"""Device memory that two processes share, and evaluations that use it."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHER = """
import socket, sys
import torch
from sandbox.jail.arena import Arena, read, write
sock = socket.socket(fileno=int(sys.argv[1]))
_, fds, _, _ = socket.recv_fds(sock, 1, 1)
arena = Arena.open(0, fds[0], int(sys.argv[2]))
x = arena.part("inputs")[: 4096].view(torch.float32).clone()
arena.part("outputs")[: 4096].view(torch.float32).copy_(2 * x)
torch.cuda.synchronize()
sock.sendall(b"x")
sock.recv(1)
arena.close()
"""


def test_what_one_process_writes_the_other_reads():
    torch = pytest.importorskip("torch")
    import os
    import socket

    from sandbox.jail.arena import Arena

    arena, fd = Arena.create(0, 1 << 20)
    ours, theirs = socket.socketpair()
    data = torch.randn(1024, device="cuda:0")
    arena.part("inputs")[:4096].view(torch.float32).copy_(data)
    torch.cuda.synchronize()
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(theirs.fileno()), str(arena.bytes)], pass_fds=[theirs.fileno()], cwd=ROOT
    )
    theirs.close()
    socket.send_fds(ours, [b"x"], [fd])
    os.close(fd)
    ours.settimeout(100)
    assert ours.recv(1) == b"x"
    assert torch.equal(arena.part("outputs")[:4096].view(torch.float32), 2 * data)
    ours.sendall(b"x")
    assert other.wait(60) == 0
    arena.close()


POOL = """
import os, sys
import torch
from sandbox.jail.arena import Arena
from sandbox.jail.device_cuda import CudaDevice
device = CudaDevice(name="cuda:0", language="triton")
device.setup()
arena, fd = Arena.create(0, 160 << 20)
pool = device.open_pool(arena.part("pool"))
x = torch.randn(1 << 20, device="cuda:0")
big = torch.randn(15 << 20, device="cuda:0")
held = []

def work():
    held[:] = [torch.relu(x + n) for n in range(6)] + [x[:7] * 2]

def right():
    return all(torch.equal(out, torch.relu(x + n)) for n, out in enumerate(held[:6])) and torch.equal(held[6], x[:7] * 2)

work()
assert not any(map(pool.holds, held))
with device.taking_from(pool):
    work()
assert all(map(pool.holds, held)) and right()

def waits():
    held[:] = [x + 1]
    held[0].sum().item()

for _ in range(2):
    replay = None
    held.clear()
    assert device.record(waits, pool) is None and "captur" in device.refused, device.refused
    held.clear()
    replay = device.record(work, pool)
    assert replay is not None and all(map(pool.holds, held)), device.refused
    x.normal_()
    replay()
    device.synchronize()
    assert right()

def too_much():
    held[:] = [big + n for n in range(6)]

too_much()
replay = None
held.clear()
replay = device.record(too_much, pool)
assert replay is not None and 0 < sum(map(pool.holds, held)) < 6, device.refused
big.normal_()
replay()
device.synchronize()
assert all(torch.equal(out, big + n) for n, out in enumerate(held))
replay = None
held.clear()
pool.renew()
with device.taking_from(pool):
    work()
assert all(map(pool.holds, held)) and right()
print("all right", flush=True)
os._exit(0)
"""


def test_what_is_made_meanwhile_lies_in_the_pool_recorded_or_not_and_beyond_its_size_elsewhere():
    done = subprocess.run([sys.executable, "-c", POOL], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "all right" in done.stdout, done.stdout + done.stderr


def test_evaluations_share_memory_with_their_jails(server, server_log, judge):
    start = time.monotonic()
    result = judge("task_add", "add_triton", suffix="\n# by shared memory\n", timing="none")
    print(f"{time.monotonic() - start:.2f} s, {result.stage_s}")
    assert result.outcome == "ok" and all(trial.max_abs_err == 0 for trial in result.trials)
    assert "go through the host" not in server_log.read_text()


def test_a_wrong_element_is_found_wherever_it_is(judge):
    wrong = judge(
        "task_add", "add_triton", suffix="\n# one element\n", timing="none",
        change=("return out", "out[1999, 4001] += 0.5; return out"),
    )  # fmt: skip
    assert wrong.outcome == "incorrect" and "[1999, 4001]" in wrong.feedback
