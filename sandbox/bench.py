"""What a server does on its machine: cost of a call, time to a verdict, verdicts a second, spread of one kernel's time.

Candidates are new to the server each time (a mark in their source differs), so all are built, checked and timed; only the repeats
are answered from the cache.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from sandbox.client import SandboxClient
from sandbox.protocol import Candidate, EvaluationResult, Options, TaskSpec
from sandbox.top import parse

CALLS, BATCH, REPEATS_S = 200, 64, 1.0
TASK = """
import torch

class Model(torch.nn.Module):
    def forward(self, x, y):
        return x * y + x

def get_inputs():
    return [torch.randn({rows}, {columns}), torch.randn({rows}, {columns})]

def get_init_inputs():
    return []
"""
CPP = """
extern "C" void kernel(const float* x, const float* y, float* out) {{
#pragma omp parallel for simd
  for (long i = 0; i < out_n; ++i) out[i] = x[i] * y[i] + x[i];
}}
// {mark}
"""
TRITON = """
import torch
import triton
import triton.language as tl

@triton.jit
def kernel_{mark}(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x * tl.load(y_ptr + offsets, mask=mask) + x, mask=mask)

class ModelNew(torch.nn.Module):
    def forward(self, x, y):
        out = torch.empty_like(x)
        kernel_{mark}[(triton.cdiv(x.numel(), {block}),)](x, y, out, x.numel(), BLOCK={block})
        return out
"""


class BenchError(RuntimeError):
    """The server does not judge the bench's own right kernels as right; the text is its verdict."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured. Times in seconds or milliseconds as named; `alone_ms`: for which a device is kept for one evaluation alone;
    `spread`: largest over smallest median time of kernels that differ in their names alone."""

    device: str
    language: str
    workers: int
    call_ms: float
    candidates: int
    latency_s: float
    worst_latency_s: float
    alone_ms: float
    throughput_per_s: float
    repeats_per_s: float
    spread: float

    def lines(self) -> list[str]:
        """For people."""
        n = f"{self.candidates} new candidates"
        rows = [
            ("a call", f"{self.call_ms:.2f} ms", f"health, median of {CALLS}"),
            ("time to a verdict", f"{self.latency_s:.2f} s", f"{n} one after another, median; the worst {self.worst_latency_s:.2f} s"),
            ("device kept alone", f"{self.alone_ms:.0f} ms", "an evaluation, for timing"),
            ("verdicts", f"{self.throughput_per_s:.2f} /s", f"{n} at once"),
            ("repeats", f"{self.repeats_per_s:,.0f} /s", f"of candidates judged before, in batches of {BATCH}"),
            ("spread", f"{self.spread:.3f}", "of one kernel's time over its evaluations, largest over smallest"),
        ]
        return [f"{self.language} on {self.device}, {self.workers} oracles"] + [f"  {a:<18} {b:>12}   {c}" for a, b, c in rows]

    def as_dict(self) -> dict:
        return asdict(self)


def run(client: SandboxClient, device: str, candidates: int, say: Callable[[str], None]) -> Report:
    """Measures a server that should have nothing else to do.

    Args:
      device: "cpu" (C++ kernels) or "cuda:N" (Triton).
      candidates: for the latency one after another, and as many for the throughput at once.
      say: told what is being measured.

    Raises:
      BenchError: a candidate is not judged ok. SandboxUnavailable, SandboxRejected: see the client.
    """
    on_gpu = device != "cpu"
    task = TaskSpec(reference=TASK.format(rows=8192 if on_gpu else 512, columns=1024), name="bench_multiply_add", device=device)
    new = _new_candidates(on_gpu)
    options = Options(timing="quick")

    def judged(batch: list[Candidate]) -> list[EvaluationResult]:
        results = client.evaluate(task, batch, options)
        for result in results:
            if result.outcome != "ok":
                raise BenchError(f"the bench's own kernel was judged {result.outcome}: {result.feedback}")
        return results

    say("warming up")
    workers = client.health().queue.workers
    judged([next(new) for _ in range(2 * workers)])
    say("calls")
    calls = [seconds_of(client.health) for _ in range(CALLS)]
    say("candidates one after another")
    before, latencies, results = seconds_alone(client), [], []
    for _ in range(candidates):
        start = time.monotonic()
        results += judged([next(new)])
        latencies.append(time.monotonic() - start)
    alone_s = (seconds_alone(client) - before) / candidates
    say("candidates at once")
    together = [next(new) for _ in range(candidates)]
    throughput = candidates / seconds_of(lambda: judged(together))
    say("repeats")
    repeated = (together * BATCH)[:BATCH]
    rounds, start = 0, time.monotonic()
    while rounds == 0 or time.monotonic() - start < REPEATS_S:
        judged(repeated)
        rounds += 1
    repeats = rounds * BATCH / (time.monotonic() - start)
    medians = [result.timing.candidate.median_ms for result in results if result.timing]
    if not medians:
        raise BenchError(f"nothing was timed: {'; '.join(results[0].notes)}")
    return Report(
        device=device,
        language="triton" if on_gpu else "cpp",
        workers=workers,
        call_ms=1000 * statistics.median(calls),
        candidates=candidates,
        latency_s=statistics.median(latencies),
        worst_latency_s=max(latencies),
        alone_ms=1000 * alone_s,
        throughput_per_s=throughput,
        repeats_per_s=repeats,
        spread=max(medians) / min(medians),
    )


def _new_candidates(on_gpu: bool) -> Iterator[Candidate]:
    while True:
        mark = secrets.token_hex(8)
        if on_gpu:
            yield Candidate(source=TRITON.format(mark=mark, block=1024), language="triton")
        else:
            yield Candidate(source=CPP.format(mark=mark), language="cpp", form="kernel")


def seconds_alone(client: SandboxClient) -> float:
    """Seconds for which devices of a server have been one evaluation's alone so far."""
    return sum(parse(client.metrics()).get("sandbox_exclusive_seconds_total", {}).values())


def seconds_of(work: Callable[[], object]) -> float:
    """How long something takes."""
    start = time.monotonic()
    work()
    return time.monotonic() - start
