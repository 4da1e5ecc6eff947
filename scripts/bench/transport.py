"""How fast payloads travel between a trusted process and a runner's process, and what a small message takes.

    python scripts/bench/transport.py [--mib=1,8,64] [--turns=4] [--out=scripts/bench/results/transport.json]

Two processes, one channel. Per size and direction: GB/s from the call that sends a payload until the receiver
has read every byte of it (a sum) and answered with a small message. `shared` sends every payload in shared
memory (the channel by itself does so from `threshold_bytes`), `streamed` none; `round_trip_us` is a message
without a payload and its answer. The best of all repeats counts, as others use the processor too.

The allocator keeps freed memory of up to 32 MiB at hand, so a receiver that frees every payload before the
next one comes, as in `warm`, receives smaller ones into pages that are there already. A judge's receivers
seldom do: they keep what they get, and each candidate is a new process. In `cold` no freed memory is kept.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import socket
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from serving import provenance

from sandbox.jail import bulk
from sandbox.jail.frames import Channel, ChannelClosed, make_pair
from sandbox.jail.tensors import pack, unpack

ROADS = {"streamed": 0, "shared": bulk.UNBOUNDED}
"""Largest payload that is sent in shared memory."""
M_MMAP_THRESHOLD = -3
LIMIT_BYTES = 8 << 30
SMALL_MESSAGES = 200


def serve(sock: socket.socket, max_bulk_bytes: int) -> None:
    """The other process: reads what comes, or answers with as many bytes as it is asked for."""
    channel = Channel(sock, "n", max_bulk_bytes=max_bulk_bytes, max_held_bytes=bulk.UNBOUNDED)
    payload = torch.empty(0, dtype=torch.uint8)
    while True:
        try:
            message = channel.receive(LIMIT_BYTES)
        except ChannelClosed:
            return
        reply_bytes = message.header.get("reply_bytes", 0)
        read(message)
        if reply_bytes != payload.nbytes:
            payload = make_payload(reply_bytes)
        entries, buffers = pack([payload])
        channel.send({"tensors": entries}, buffers)


def make_payload(size: int) -> torch.Tensor:
    return torch.arange(size // 8, dtype=torch.int64).view(torch.uint8)


def read(message) -> int:
    """Sum over all words of the message's tensors: touches every byte."""
    tensors = unpack(message.header.get("tensors", []), message.buffers)
    return sum(int(tensor.view(torch.int64).sum()) for tensor in tensors if tensor.nbytes)


def best_s(action: Callable[[], None], repeats: int) -> float:
    """Shortest of `repeats` runs, after one that does not count."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def keep_no_freed_memory() -> None:
    """Has the allocator give every larger block of memory back at once, in this process and its children."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)


def measure(sizes: list[int], repeats: int, max_bulk_bytes: int) -> dict:
    """All numbers of one road."""
    ours, theirs = make_pair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        serve(theirs, max_bulk_bytes)
        os._exit(0)
    theirs.close()
    channel = Channel(ours, "n", max_bulk_bytes=max_bulk_bytes)

    def exchange(payload: torch.Tensor, reply_bytes: int) -> None:
        entries, buffers = pack([payload])
        channel.send({"tensors": entries, "reply_bytes": reply_bytes}, buffers)
        read(channel.receive(LIMIT_BYTES))

    try:
        nothing = make_payload(0)
        result: dict = {"round_trip_us": round(1e6 * best_s(lambda: exchange(nothing, 0), SMALL_MESSAGES), 1)}
        for size in sizes:
            payload = make_payload(size)
            spans_s = {
                "to_runner": best_s(lambda payload=payload: exchange(payload, 0), repeats),
                "from_runner": best_s(lambda size=size: exchange(nothing, size), repeats),
            }
            result[f"{size >> 10} KiB"] = {
                name: {"gb_per_s": round(size / span_s / 1e9, 3), "ms": round(1e3 * span_s, 3)}
                for name, span_s in spans_s.items()
            }
    finally:
        channel.close()
        os.waitpid(pid, 0)
    return result


def better(known: dict, found: dict) -> dict:
    """The best of two results of `measure`."""
    best: dict = {"round_trip_us": min(known["round_trip_us"], found["round_trip_us"])}
    for size in known.keys() - best.keys():
        best[size] = {way: min(known[size][way], found[size][way], key=lambda one: one["ms"]) for way in known[size]}
    return {name: best[name] for name in known}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", default="0.25,1,4,8,16,32,64,256", help="sizes of payloads")
    parser.add_argument("--repeats", type=int, default=10, help="messages of each size and direction in a turn")
    parser.add_argument("--turns", type=int, default=4, help="how often the roads take turns")
    parser.add_argument("--out", type=Path, help="also write the result here, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [int(float(mib) * (1 << 20)) for mib in arguments.mib.split(",")]
    result = {
        **provenance(),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "repeats": arguments.repeats,
        "turns": arguments.turns,
        "threshold_bytes": bulk.MIN_BYTES,
    }
    bulk.MIN_BYTES = 1
    for turn in range(arguments.turns):
        for state, prepare in (("warm", None), ("cold", keep_no_freed_memory)):
            for road, most in ROADS.items():
                # A process of its own, so that none finds memory that another has freed.
                with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), prepare) as pool:
                    found = pool.submit(measure, sizes, arguments.repeats, most).result()
                known = result.setdefault(state, {}).get(road)
                result[state][road] = better(known, found) if turn else found
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
