"""The GPU as a runner's device, driven directly: clocks, precision, profile, own kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = Path(__file__).parent / "kernels"

PRELUDE = """
import dataclasses, json, os, sys, time
from sandbox.jail.device import make_device
import torch

def open_device(path=None, language="triton"):
    device = make_device("cuda:0", language=language)
    device.before_load()
    assert not torch.cuda.is_initialized()
    namespace = {}
    if path:
        source = open(path).read()
        own = os.path.join(os.environ["TMPDIR"], "candidate.py")
        open(own, "w").write(source)
        import importlib.util
        spec = importlib.util.spec_from_file_location("candidate", own)
        module = importlib.util.module_from_spec(spec)
        sys.modules["candidate"] = module
        spec.loader.exec_module(module)
        namespace = vars(module)
    device.setup()
    return device, namespace
"""


@pytest.fixture
def run(tmp_path):
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": path}

    def execute(code, *arguments):
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + code, *map(str, arguments)],
            capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        print(done.stdout)
        return json.loads(done.stdout.splitlines()[-1])

    return execute


def test_a_profile_tells_own_kernels_from_pytorchs(run):
    code = """
device, module = open_device(sys.argv[1])
from sandbox.verdict.coverage import DeviceEvent, own_share
x, y = (device.to_device(torch.randn(2048, 2048)) for _ in range(2))
model = module["ModelNew"]()
samples = device.profile(lambda a, b: torch.relu(model(a, b)), [x, y])
own = device.own_kernels()
print([dataclasses.asdict(s) for s in samples], own)
report = own_share(samples, own)
print(json.dumps({"coverage": report.coverage, "own": [dataclasses.asdict(k) for k in own], "note":
report.note,
                  "kernels": [dataclasses.asdict(k) for k in report.kernels],
                  "samples": [dataclasses.asdict(s) for s in samples]}))
"""
    seen = run(code, KERNELS / "add_triton.py")
    assert 0.3 < seen["coverage"] < 0.9
    assert [k["name"] for k in seen["kernels"] if k["own"]] == ["add_kernel"]
    assert seen["note"] == ""
    assert [k["name"] for k in seen["own"]] == ["add_kernel"]
    mine = next(s for s in seen["samples"] if s["name"] == "add_kernel")
    assert (mine["block_threads"], mine["registers"]) == (
        seen["own"][0]["block_threads"], seen["own"][0]["registers"],
    )  # fmt: skip


def test_the_profiler_starts_without_importing_inductor(run):
    code = """
device, _ = open_device()
x = device.to_device(torch.randn(1 << 20))
start = time.perf_counter()
device.start_profiler()
seconds = time.perf_counter() - start
samples = device.profile(torch.neg, [x])
imported = "torch._inductor" in sys.modules
print(json.dumps({"seconds": seconds, "inductor": imported, "kernels": [s.name for s in samples], "busy_ms": device.busy_ms}))
"""
    seen = run(code)
    assert not seen["inductor"]
    assert len(seen["kernels"]) == 1 and seen["busy_ms"] > 0


def test_events_and_host_agree_on_large_work_and_launching_small_work_is_not_billed(run):
    code = """
device, _ = open_device()
big = [[device.to_device(torch.randn(64 << 20))] for _ in range(2)]
small = [[device.to_device(torch.randn(1 << 16))] for _ in range(2)]
fn = lambda x: torch.add(x, 1.0)
for inputs in (big, small):
    for _ in range(3):
        device.time_block(fn, 20, lambda i: inputs[i % 2])
blocks = {
    "cold": device.time_block(fn, 20, lambda i: big[i % 2]),
    "warm": device.time_block(fn, 20, lambda i: big[i % 2], flush=False),
    "small_cold": device.time_block(fn, 200, lambda i: small[i % 2]),
    "small_warm": device.time_block(fn, 200, lambda i: small[i % 2], flush=False),
    "empty": device.time_block(fn, 0, lambda i: []),
}
facts = {name: [b.span_ms, b.event_ms, b.wall_ms, b.bound_by] for name, b in blocks.items()}
print(json.dumps({**facts, "pause_ms": device._pause_ms}))
"""
    seen = run(code)
    assert abs(seen["warm"][2] - seen["warm"][1]) / seen["warm"][1] < 0.15
    assert abs(seen["warm"][0] - seen["cold"][0]) / seen["cold"][0] < 0.15
    assert seen["empty"][0] < 0.1
    # Back to back, launching 256 KiB of work takes the host longer than the work takes the device.
    assert seen["small_cold"][0] < 0.8 * seen["small_warm"][0]


def test_work_on_a_side_stream_is_paid_for_back_to_back_and_seen_by_the_profile(run):
    code = """
device, _ = open_device()
x = device.to_device(torch.randn(4096, 4096))
side = torch.cuda.Stream()
def honest(x):
    return x @ x
def hidden(x):
    with torch.cuda.stream(side):
        return x @ x
spans = {}
for name, fn in (("honest", honest), ("hidden", hidden)):
    device.time_block(fn, 3, lambda i: [x])
    block = device.time_block(fn, 10, lambda i: [x], flush=False)
    device.profile(fn, [x])
    spans[name] = [block.span_ms, block.bound_by, device.busy_ms]
print(json.dumps(spans))
"""
    seen = run(code)
    assert seen["honest"][1] == "device"
    assert seen["hidden"][1] == "host"
    assert seen["hidden"][0] > 0.8 * seen["honest"][0]
    assert abs(seen["hidden"][2] - seen["honest"][2]) / seen["honest"][2] < 0.2
    assert seen["hidden"][2] > 0.5 * seen["hidden"][0] / 10


def test_checks_run_without_tf32_and_timing_with_pytorchs_defaults(run):
    code = """
device, _ = open_device()
flags = lambda: [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]
seen = []
device.time_block(lambda: seen.append(flags()), 1, lambda i: [])
print(json.dumps({"checks": flags(), "timing": seen[-1]}))
"""
    assert run(code) == {"checks": [False, False], "timing": [False, True]}


def test_the_allocator_stops_at_the_runners_share(run):
    code = """
os.environ["SANDBOX_GPU_MEMORY_SHARE"] = "0.05"
device, _ = open_device()
total = device.memory_info()["total_bytes"]
try:
    torch.empty(total // 10, dtype=torch.int8, device="cuda:0")
    print(json.dumps("allocated"))
except torch.OutOfMemoryError:
    print(json.dumps("refused"))
"""
    assert run(code) == "refused"


def test_device_memory_of_this_process_is_seen_from_outside(run):
    code = """
device, _ = open_device()
from sandbox.jail import nvml
from sandbox.jail.device_cuda import physical_index
keep = torch.empty(1 << 30, dtype=torch.int8, device="cuda:0")
torch.cuda.synchronize()
print(json.dumps(nvml.process_bytes(physical_index("cuda:0"), os.getpid())))
"""
    seen = run(code)
    assert seen is not None and 1 << 30 < seen < 4 << 30


def test_the_cards_memory_is_as_fast_as_such_cards_are_and_no_copy_is_faster():
    import torch

    from sandbox.oracle.roofline import Traffic, measure_bandwidth

    found = measure_bandwidth("cuda:0")
    print(found)
    assert 1e12 < found.read < 9e12 and found.read <= found.write < 3e13
    x = torch.randn(1 << 26, device="cuda:0")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.relu(x)
    torch.cuda.synchronize()
    start.record()
    torch.relu(x)
    end.record()
    torch.cuda.synchronize()
    assert found.floor_ms(Traffic(x.nbytes, x.nbytes)) < start.elapsed_time(end)
