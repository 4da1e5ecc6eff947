"""How fast the driver creates and ends CUDA contexts: the ceiling of a judge that gives every candidate a process of its own.

    python scripts/bench/contexts.py --out scripts/bench/results/contexts.json [--seconds 4] [--processes 1,4,8,16]

For each number of processes at once, on one GPU and on all of them: processes that open the device's context, take memory, and end,
one after another in each lane, for some seconds. The driver works under locks of the whole host, so lanes wait for each other.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import struct
import time
from pathlib import Path

from serving import provenance

MIB = 1 << 20
VARIANTS = {"usual": {}, "one_connection": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
"""Environment of the processes, by name."""


def _checked(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with CUDA error {code}")


def _one(device: int, memory: int) -> bytes:
    """In a process of its own: opens the context and takes memory; seconds of cuInit, of the context and of the memory."""
    stamps = [time.monotonic()]
    cuda = ctypes.CDLL("libcuda.so.1")
    _checked(cuda.cuInit(0), "cuInit")
    stamps.append(time.monotonic())
    context = ctypes.c_void_p()
    _checked(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    _checked(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    stamps.append(time.monotonic())
    pointer = ctypes.c_uint64()
    if memory:
        _checked(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(memory)), "cuMemAlloc")
    _checked(cuda.cuCtxSynchronize(), "cuCtxSynchronize")
    stamps.append(time.monotonic())
    return struct.pack("3d", *(after - before for before, after in zip(stamps, stamps[1:], strict=False)))


def _lane(device: int, memory: int, until: float, report: int) -> None:
    """Processes one after another; for each, its own three times and how long it took to end, written to `report`."""
    while time.monotonic() < until:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(write, _one(device, memory))
                os._exit(0)
            except BaseException as error:
                print(f"device {device}: {error}", flush=True)
                os._exit(1)
        os.close(write)
        times = os.read(read, 24)
        ended = time.monotonic()
        os.close(read)
        _, status = os.waitpid(pid, 0)
        if status or len(times) != 24:
            raise SystemExit(f"a process failed on device {device} (status {status})")
        os.write(report, times + struct.pack("d", time.monotonic() - ended))


def rate(devices: list[int], processes: int, seconds: float, memory: int) -> dict:
    """Contexts a second with `processes` lanes on each device, and what a process waits for."""
    read, write = os.pipe()
    start = time.monotonic()
    lanes = []
    for device in devices:
        for _ in range(processes):
            pid = os.fork()
            if pid == 0:
                os.close(read)
                try:
                    _lane(device, memory, start + seconds, write)
                    os._exit(0)
                except BaseException as error:
                    print(error, flush=True)
                    os._exit(1)
            lanes.append(pid)
    os.close(write)
    data = b""
    while piece := os.read(read, 1 << 16):
        data += piece
    os.close(read)
    if any(os.waitpid(pid, 0)[1] for pid in lanes):
        raise SystemExit("a lane failed")
    took = time.monotonic() - start
    rows = list(struct.iter_unpack("4d", data))
    init, context, taken, end = (1e3 * statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "gpus": len(devices), "processes_each": processes, "contexts": len(rows), "per_s": len(rows) / took,
        "median_ms": {"cuInit": init, "context": context, "memory": taken, "end": end},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--processes", default="1,4,8,16", help="at once on each GPU")
    parser.add_argument("--memory-mib", type=int, default=256)
    parser.add_argument("--gpus", type=int, help="of this host; all of them if not given")
    parser.add_argument("--variants", default="usual")
    arguments = parser.parse_args()
    header = provenance()  # asks the driver in a process of its own: a CUDA that is open does not survive a fork
    gpus = arguments.gpus or len([card for card in Path("/proc/driver/nvidia/gpus").iterdir()])
    rows = []
    for variant in arguments.variants.split(","):
        os.environ.update(VARIANTS[variant])
        for devices in sorted({1, gpus}):
            for processes in (int(number) for number in arguments.processes.split(",")):
                found = rate(list(range(devices)), processes, arguments.seconds, arguments.memory_mib * MIB)
                rows.append({"variant": variant, **found})
                print(json.dumps(rows[-1]), flush=True)
                arguments.out.write_text(json.dumps({**header, "memory_mib": arguments.memory_mib, "rows": rows}, indent=1) + "\n")
        for name in VARIANTS[variant]:
            os.environ.pop(name, None)


if __name__ == "__main__":
    main()
