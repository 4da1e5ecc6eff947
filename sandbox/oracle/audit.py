"""Drives the audit of a timing (see `sandbox.oracle.fresh`) and lets it rule where the ordinary timing is too
good."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sandbox.jail.arena import padded
from sandbox.jail.carrier import ArenaCarrier
from sandbox.jail.jailed import Runner
from sandbox.oracle.clock import GPU_PLANS
from sandbox.oracle.fresh import Audit, CopiedOutputs, Pool, sample_places
from sandbox.oracle.fresh_gpu import ArenaOutputs, GpuBlock, calls_of_block, draw_blocks
from sandbox.oracle.left import LeftOutputs, OutputsLost, Unreadable
from sandbox.oracle.reference import Inputs, Reference
from sandbox.protocol import Timing, Trial
from sandbox.verdict.timing import Interval

SLACK, REPLAYED_SLACK = 1.25, 1.15
"""Ordinary calls find their inputs in the cache on a CPU, audited ones do not: so much faster they may be. On a GPU, where both are cold
and the audit replays recordings, an ordinary call is faster because what it writes may stay in the cache (seen: audited calls of 1.18
times the ordinary time, of candidate and reference alike). What a claim is held against where both bounds are passed, the ratio that the
audit has seen, is sound too."""
WRITTEN_BACK = 0.10
"""What more an audited call may take, as a share of the time that memory needs for what it moves: it must write back what the call before it
has left in the cache, an ordinary call leaves its own there. (Seen on an H200: a kernel for 67 MB, 15.9 us where memory needs 16.1, took 18.7
to 19.3 us in audits.) It is forgiven to claims of about that time (see `AT_MEMORY`), since whoever states less than the truth gets no further
down than there, and kernels that memory does not bound need it not."""
AT_MEMORY = (0.8, 0.0), (0.9, 1.0), (1.1, 1.0), (1.4, 0.0)
"""How much of that, by what is claimed over what memory needs; linear between these points."""
RULED_BY = "oracle wall clock on fresh inputs"
LAUNCH_S = 5.0
"""For some launches of the reference's own, however little of the candidate's time is left."""
GPU_ROUNDS = 3
"""So many audits, each on inputs of its own, before a GPU's timing is ruled. Their clock is the host's, which another process that opens
or ends a context holds up for a millisecond (seen: 82 us instead of 34 for a call, in the first evaluations of a server). No luck makes
a candidate faster than it is: what it returns in a block is right, is read while the clock runs, and was asked of it within."""

AnyOutputs = CopiedOutputs | LeftOutputs | ArenaOutputs
Compare = Callable[[list[torch.Tensor], list[torch.Tensor]], Trial]


class AuditFailed(Exception):
    """A timed call returned something wrong: all that it returned, what was right, and what other calls'
    was."""

    def __init__(
        self,
        trial: Trial,
        got: list[torch.Tensor],
        expected: list[torch.Tensor],
        others: list[list[torch.Tensor]],
    ):
        super().__init__(trial.reason)
        self.trial, self.got, self.expected, self.others = trial, got, expected, others


def audit(
    blocks: Sequence[Any],
    theirs: AnyOutputs,
    ours: AnyOutputs,
    compare: Compare,
    left_s: Callable[[], float],
    rng: random.Random,
) -> Audit:
    """Runs the candidate and the reference on blocks of fresh inputs and compares what every call left.

    Args:
      blocks: of inputs, for `theirs` and `ours` alike; in random order the first is a rehearsal whose time does not count.
      theirs, ours: where the candidate and the reference leave their outputs.
      compare: (expected, got) -> trial.
      left_s: seconds that an order may take now.
      rng: draws which elements are read and which calls are compared in full.

    Raises:
      AuditFailed: a call left a wrong output. What an order raises; TaskRejected when the reference fails.
    """
    calls = len(blocks[0].calls)
    if isinstance(ours, ArenaOutputs):
        ours.find_launch(max(left_s(), LAUNCH_S))
    found = Audit(calls=calls, launch_ms=ours.launch_ms, apart_ms=ours.apart_ms)
    for number, block in enumerate(rng.sample(blocks, len(blocks))):
        places = sample_places(ours.entries, rng)
        run = theirs.run(block, places, left_s())
        checked = rng.randrange(calls)
        got = [output.clone() for output in theirs.of_call(checked)]
        expected = ours.run(block, places, left_s())
        if number:  # the first block makes the memory that the others use again: its outputs count, its time does not
            found.candidate.append(run)
            found.reference.append(expected)
        _check(run.samples, expected.samples, theirs, ours, compare)
        right = [output.clone() for output in ours.of_call(checked)]
        trial = compare(right, got)
        if not trial.ok:
            raise AuditFailed(trial, got, right, _all_outputs(ours, calls))
    return found


def on_host(
    reference: Reference, candidate: Runner, eager_ms: float, timeout_s: float
) -> tuple[Sequence[Any], AnyOutputs, AnyOutputs]:
    """What `audit` takes, on a CPU: inputs of the reference's pool (used or drawn), outputs where the runners leave them, or
    copies in memory of the host.

    Args:
      eager_ms: time of one call of the reference.
      timeout_s: of an order.

    Raises:
      OutputsLost: the candidate does not let its memory be read. What an order raises.
    """
    pool = reference.pool(lambda: draw_pool(reference, eager_ms))
    if not reference.changes and not reference.aliases:
        inputs_bytes = max(block.bytes for block in pool.blocks)
        try:
            ours = LeftOutputs(
                reference.order, reference.runner.pid, reference.outputs, timeout_s, inputs_bytes=inputs_bytes, twice=True, failing=OSError
            )  # fmt: skip
        except Unreadable:
            ours = None
        if ours is not None:
            try:
                theirs = LeftOutputs(candidate.call, candidate.pid, reference.outputs, timeout_s, inputs_bytes=inputs_bytes)
            except Unreadable as error:
                raise OutputsLost(str(error)) from error
            return pool.blocks, theirs, ours
    calls = len(pool.blocks[0].calls)
    theirs = CopiedOutputs(candidate.call, reference.outputs, calls, timeout_s)
    return pool.blocks, theirs, CopiedOutputs(reference.order, reference.outputs, calls, timeout_s)


@dataclass(frozen=True)
class GpuParts:
    """What `audit` takes, on a GPU, made ready before the timing.

    Attributes:
      recorded: both runners have recorded the calls and replay them, so that their launches do not count; else they do the
        calls anew.
      refused: why they do.
      draw: makes so many other blocks of the same layout, with inputs that no process has seen.
    """

    blocks: Sequence[GpuBlock]
    theirs: ArenaOutputs
    ours: ArenaOutputs
    recorded: bool
    refused: str
    draw: Callable[[int], Sequence[GpuBlock]]


def on_gpu(
    reference: Reference,
    candidate: Runner,
    inputs: Sequence[Inputs],
    eager_ms: float,
    left_s: Callable[[], float],
    *,
    record: bool = True,
    n_blocks: int = GPU_PLANS["full"].audit_blocks,
) -> GpuParts | None:
    """What `audit` takes, on a GPU: inputs made of those of the checks, all in the runners' arenas.

    None where a runner has no arena or a call does not fit into it.

    Args:
      eager_ms: time of one call of the reference.
      left_s: seconds that an order may take now.
      record: have both runners try to record the calls.
      n_blocks: blocks of calls, one of them a rehearsal.
    """
    carriers = candidate.carrier, reference.runner.carrier
    if not all(isinstance(carrier, ArenaCarrier) for carrier in carriers):
        return None
    part_bytes = min(carrier.part("inputs").numel() for carrier in carriers)
    theirs = ArenaOutputs(candidate.call, carriers[0], reference.outputs)
    ours = ArenaOutputs(reference.order, carriers[1], reference.outputs, twice=True, failing=OSError)
    input_bytes = max(sum(padded(tensor.nbytes) for tensor in one.tensors) for one in inputs)
    calls = calls_of_block(eager_ms, input_bytes, theirs.stride_bytes, part_bytes)
    if calls < 1:
        return None

    def draw(count: int) -> Sequence[GpuBlock]:
        return draw_blocks(inputs[0].args, [one.tensors for one in inputs], calls, secrets.randbits(60), count)

    blocks = draw(n_blocks)
    recorded = ours.prepare(blocks[0], left_s(), record=record)
    refused = f"the reference's: {ours.refused}" if ours.refused else ""
    if theirs.prepare(blocks[0], left_s(), record=recorded) != recorded:
        # Both sides do the same, or what the one's way costs would be the other's gain.
        refused = theirs.refused
        recorded = ours.prepare(blocks[0], left_s(), record=False)
    return GpuParts(blocks, theirs, ours, recorded, refused, draw)


def draw_pool(reference: Reference, eager_ms: float) -> Pool:
    """Inputs for the audits of a task whose reference takes `eager_ms` a call."""
    return Pool.draw(reference.inputs, eager_ms, reference.max_output_bytes // 2)


def _check(
    got: list[list[torch.Tensor]],
    expected: list[list[torch.Tensor]],
    theirs: AnyOutputs,
    ours: AnyOutputs,
    compare: Compare,
) -> None:
    """Compares the elements that were read while the clock ran, all calls at once, then each to name the
    wrong one."""
    joined = [[torch.cat(of_one) for of_one in zip(*calls, strict=True)] for calls in (expected, got)]
    if compare(*joined).ok:
        return
    for number, (want, have) in enumerate(zip(expected, got, strict=True)):
        trial = compare(want, have)
        if not trial.ok:
            output, right = ([part.clone() for part in of.of_call(number)] for of in (theirs, ours))
            raise AuditFailed(trial, output, right, _all_outputs(ours, len(got)))
    raise AuditFailed(compare(*joined), joined[1], joined[0], [])


def _all_outputs(outputs: AnyOutputs, calls: int) -> list[list[torch.Tensor]]:
    return [[output.clone() for output in outputs.of_call(number)] for number in range(calls)]


Ruled = tuple[Timing, Interval, Interval]


def rule_rounds(timing: Timing, rounds: Iterable[Audit], *, replayed: bool = False, memory_ms: float = 0.0) -> Ruled:
    """`rule` by the first of these audits that bears the timing out; if none does, by the one with the middle ratio. The others
    are not begun."""
    ruled: list[Ruled] = []
    for found in rounds:
        ruled.append(rule(timing, found, replayed=replayed, memory_ms=memory_ms))
        if ruled[-1][0] is timing:
            return ruled[-1]
    return sorted(ruled, key=lambda one: one[0].speedup)[len(ruled) // 2]


def replayed_slack(claim_ms: float, memory_ms: float) -> float:
    """So many times what is claimed a replayed call may take: `REPLAYED_SLACK`, and what `WRITTEN_BACK` says.

    Args:
      memory_ms: what the device's memory needs for a call's inputs and outputs.
    """
    if memory_ms <= 0:
        return REPLAYED_SLACK
    forgiven = float(np.interp(claim_ms / memory_ms, *zip(*AT_MEMORY, strict=True)))
    return REPLAYED_SLACK + WRITTEN_BACK * forgiven * min(1.0, memory_ms / claim_ms)


def rule(timing: Timing, found: Audit, *, replayed: bool = False, memory_ms: float = 0.0) -> Ruled:
    """The timing, slowed to what the audit has seen where it claims more than the audit leaves possible; the audit's times
    of one call of candidate and reference, in milliseconds.

    Where calls were replayed, what is forgiven ends by degrees: a claim that exceeds the bound by some percent loses three times as many
    of the forgiven ones, until what was seen counts, by the bound that leaves more. An honest kernel's audited calls are slower by 8 to
    20 % where they write what does not fit into the cache, and no more than chance parts the ones from the others.

    Args:
      replayed: the audited calls were replayed at once. That spares both sides the device's way from one launch to the
        next, a reference of many short kernels more than others; so a claim that the candidate's own audited calls bear
        out stands, even where the reference's are faster than its ordinary ones. One that they do not bear out is held
        against the reference's audited calls like any other.
      memory_ms: see `replayed_slack`.
    """
    candidate, reference = max(found.pairs_ms(), key=lambda pair: pair[1].median / pair[0].median)
    most = reference.high / candidate.low
    slack = replayed_slack(timing.candidate.median_ms, memory_ms) if replayed else SLACK
    borne_out = replayed and candidate.low <= slack * timing.candidate.median_ms
    if borne_out or timing.speedup <= slack * most:
        return timing, candidate, reference
    # Beyond doubt it claims too much; what counts then is not the most that is possible but what was seen.
    seen, low = reference.median / candidate.median, reference.low / candidate.high
    if replayed:
        of_claim = timing.speedup * timing.candidate.median_ms / candidate.median  # by the reference's ordinary calls
        by_own = of_claim * slack * (slack * timing.candidate.median_ms / candidate.low) ** 2
        seen = max(seen * max(1.0, slack * (slack * most / timing.speedup) ** 2), min(by_own, timing.speedup))
        low, most = min(low, seen), max(most, seen)
    factor, span = timing.speedup / seen, timing.candidate
    slower = {
        "median_ms": span.median_ms * factor,
        "low_ms": span.low_ms * factor,
        "high_ms": span.high_ms * factor,
    }
    ruled = {
        "candidate": span.model_copy(update=slower),
        "speedup": seen,
        "speedup_low": low,
        "speedup_high": most,
        "noisy": True,  # two clocks disagree
        "bound_by": RULED_BY,
    }
    return timing.model_copy(update=ruled), candidate, reference
