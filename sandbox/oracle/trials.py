"""The correctness checks of one evaluation, before and after timing."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from sandbox.jail.jailed import Runner
from sandbox.oracle.audit import GPU_ROUNDS, RULED_BY, AuditFailed, GpuParts, audit, draw_pool, on_gpu, on_host, rule_rounds
from sandbox.oracle.clock import GPU_PLANS, claim_of
from sandbox.oracle.draft import Draft, Job
from sandbox.oracle.failures import MALFORMED, Failure, blamed_on_candidate
from sandbox.oracle.fresh import Audit
from sandbox.oracle.left import LeftOutputs, OutputsLost
from sandbox.oracle.reference import (
    Inputs,
    Outputs,
    Reference,
    TaskRejected,
    overwrite,
    read_outputs,
)
from sandbox.oracle.roofline import Bandwidth, needed_traffic, too_fast
from sandbox.oracle.variants import varied
from sandbox.protocol import Audited, Finding, InputVariant, Trial
from sandbox.verdict import feedback
from sandbox.verdict.correctness import all_finite, compare

TIMED_SLOTS = 3
"""Input sets that are kept and rotated through while timing."""
VARIANT_SLOT, LATE_SLOT = 900, 901
VARIANTS_SHARE = 0.3
"""Variants are tried while the judge and the reference have used up no more than this share of the checking time on them."""
MANY_BYTES = 256 << 20
"""Inputs larger than this are held once, not once a slot."""


class Trials:
    """The correctness checks of one evaluation, before and after timing."""

    def __init__(self, job: Job, reference: Reference, candidate: Runner, verdict: Draft):
        self._job, self._reference, self._candidate, self._verdict = job, reference, candidate, verdict
        self._tolerance = reference.tolerance
        self._inputs: dict[int, Inputs] = {}
        self._expected: dict[int, Outputs] = {}
        self._known: list[list[torch.Tensor]] = []
        """What calls so far had to return: a wrong output that equals one of these is a replayed one."""
        self._seed = secrets.randbits(40)
        self._on_gpu: GpuParts | None = None
        self.memory_is_open = False
        """This host lets this process read the memory of its jails, as the audit has found."""
        self._candidate_s = 0.0
        """What the candidate itself has taken of the time for other input distributions."""

    @property
    def slots(self) -> list[int]:
        """Input slots that hold checked inputs."""
        return sorted(self._inputs)

    def run(self) -> None:
        """All trials on fresh inputs. Raises Failure at the first that fails."""
        options = self._job.options
        deadline = time.monotonic() + options.check_s
        n_slots = TIMED_SLOTS
        for number in range(options.correctness_trials):
            with self._turn():
                if self._trial(number, number % n_slots, deadline) > MANY_BYTES:
                    n_slots = 1
        # A limit of its own, and the candidate's time is no reason to leave any out: it would only have to be slow.
        started = time.monotonic()
        for variant in self._job.task.variants:
            if time.monotonic() - started - self._candidate_s > VARIANTS_SHARE * options.check_s:
                self._verdict.notes.append(f"no time was left to check other input distributions ({variant})")
                break
            with self._turn():
                self._run_variant(variant, started + options.check_s)

    def _turn(self) -> AbstractContextManager[None]:
        """Ordinary access to the device for several orders and what is computed between them."""
        turns = self._candidate.turns
        return turns.of("check") if turns else nullcontext()

    def _trial(self, number: int, slot: int, deadline: float) -> int:
        """One trial on fresh inputs, which stay in `slot`; returns their bytes. Raises Failure."""
        options = self._job.options
        inputs = self._reference.inputs(secrets.randbits(40), slot)
        fields, buffers = self._candidate.carrier.give(inputs.tensors)
        with self._blamed("running", options.check_s):
            left_s = max(0.001, deadline - time.monotonic())
            self._candidate.call("set_inputs", left_s, buffers, slot=slot, args=inputs.args, **fields)
            left_s = max(0.001, deadline - time.monotonic())
            got = self._call("run", left_s, slot=slot, seed=self._seed, check=True)
        expected = self._reference.run(slot, self._seed)
        trial = self._judge(expected, got)
        self._verdict.trials.append(trial)
        if not trial.ok:
            self._check_replay("a trial is wrong", got.tensors, expected.tensors)
            raise Failure("incorrect", feedback.incorrect(trial.reason, number, options.correctness_trials))
        self._inputs[slot], self._expected[slot] = inputs, expected
        self._known.append(expected.tensors)
        return inputs.bytes

    def _run_variant(self, variant: InputVariant, deadline: float) -> None:
        """One more trial on inputs of another distribution. Raises Failure."""
        usual = self._expected[0].tensors
        tensors = varied(self._inputs[0].tensors, variant, secrets.randbits(40))
        if tensors is None or self._reference.changes:
            return
        inputs = Inputs(self._inputs[0].args, tensors)
        try:
            self._reference.set_inputs(VARIANT_SLOT, inputs)
            expected = self._reference.run(VARIANT_SLOT, self._seed)
        except TaskRejected:
            if not self._reference.alive:
                raise
            return
        if not all(map(all_finite, expected.tensors)):
            return
        fields, buffers = self._candidate.carrier.give(tensors)
        asked = time.monotonic()
        with self._blamed("running", self._job.options.check_s):
            left_s = max(0.001, deadline - asked)
            self._candidate.call(
                "set_inputs", left_s, buffers, slot=VARIANT_SLOT, args=inputs.args, **fields
            )
            got = self._call("run", left_s, slot=VARIANT_SLOT, seed=self._seed, check=True)
        self._candidate_s += time.monotonic() - asked
        trial = compare(
            expected.tensors, got.tensors, self._tolerance.for_variant(_growth(usual, expected.tensors))
        )
        if not trial.ok:
            self._fail_late(f"on {variant} inputs", trial, got.tensors, expected.tensors)
        self._known.append(expected.tensors)

    def check_kept(self, slot: int) -> None:
        """Checks the outputs of one timed call, chosen by the oracle. Raises Failure."""
        with self._turn():
            with self._blamed("timing", self._job.options.check_s):
                got = self._call("kept", self._job.options.check_s)
            expected = self._expected[slot].tensors
            trial = compare(expected, got.tensors, self._tolerance)
        if not trial.ok and not self._reference.changes:
            what = "a timed call returned something else than the checked calls"
            self._fail_late(what, trial, got.tensors, expected)

    def check_changed_inputs(self) -> None:
        """Changes a row of each input in place (of a square matrix, all), in both runners, and compares once
        more.

        Raises Failure.
        """
        if self._reference.changes:
            return
        with self._turn():
            self._change_inputs(random.Random(secrets.randbits(64)), self.slots[0])

    def _change_inputs(self, rng: random.Random, slot: int) -> None:
        fresh: list[torch.Tensor] = []
        with self._blamed("running", self._job.options.check_s):
            for number, tensor in enumerate(self._inputs[slot].tensors):
                if tensor.dim() == 0 or tensor.shape[0] < 2 or tensor.numel() == 0:
                    continue
                if tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2]:
                    # It may be symmetric or triangular, which a strange row would end: all rows change.
                    fresh = fresh or self._reference.inputs(secrets.randbits(40), LATE_SLOT).tensors
                    target, rows = 0, fresh[number]
                else:
                    # A row takes the place of another: whatever made the values valid holds for the copy too.
                    source, target = rng.sample(range(tensor.shape[0]), 2)
                    rows = tensor[source : source + 1]
                self._reference.overwrite(slot, number, target, rows)
                overwrite(self._candidate, self._job.options.check_s, slot, number, target, rows)
            got = self._call("run", self._job.options.check_s, slot=slot, seed=self._seed, check=False)
        expected = self._reference.run(slot, self._seed)
        trial = compare(expected.tensors, got.tensors, self._tolerance)
        if not trial.ok:
            what = "after its inputs changed in place the candidate is wrong"
            self._fail_late(what, trial, got.tensors, expected.tensors)

    def prepare_audit(self) -> None:
        """Draws the audit's inputs, which takes long, while others may work too.

        Raises:
          TaskRejected. Failure: the candidate breaks down.
        """
        check_s = self._job.options.check_s
        if self._job.task.device == "cpu":
            if not self._reference.pool_is_ready:
                self._reference.pool(lambda: draw_pool(self._reference, self._eager_ms()), use=False)
        elif not self._reference.changes:
            with self._turn(), self._blamed("running", check_s):
                self._on_gpu = on_gpu(
                    self._reference,
                    self._candidate,
                    [self._inputs[slot] for slot in self.slots],
                    self._eager_ms(),
                    lambda: check_s,
                    n_blocks=GPU_PLANS[self._job.options.timing].audit_blocks,
                )
            if self._on_gpu is not None and self._on_gpu.refused:
                self._verdict.notes.append(f"audited calls were not recorded and replayed: {self._on_gpu.refused}")

    @property
    def replays(self) -> bool:
        """The audit will replay recordings, so its clock sees no launches of the host."""
        return self._on_gpu is not None and self._on_gpu.recorded

    def _eager_ms(self) -> float:
        """About the time of one call of the reference."""
        block = {"calls": 2, "slots": self.slots, "keep": None, "flush": True, "which": "eager"}
        order, check_s = self._reference.order, self._job.options.check_s
        return min(claim_of(order("time_block", check_s, **block).header.get("span_ms")) for _ in range(2)) / 2

    def find_traffic(self) -> None:
        """Finds out what a call must move, once for a reference. Raises TaskRejected."""
        if self._reference.traffic is None:
            with self._turn():
                self._reference.traffic = needed_traffic(self._reference, secrets.randbits(40))

    def check_floor(self, bandwidth: Bandwidth) -> None:
        """Raises Failure for a timing that the card's memory makes impossible."""
        timing, traffic = self._verdict.timing, self._reference.traffic
        assert timing is not None and traffic is not None
        evidence = too_fast(timing, bandwidth.floor_ms(traffic), traffic)
        if evidence:
            self._verdict.timing = None
            raise Failure("integrity", f"faster than the device: {evidence}", Finding(rule="roofline", evidence=evidence))

    def audit(self, left_s: Callable[[], float], fewer: float = 1.0, memory: Bandwidth | None = None) -> None:
        """Holds the timing against calls on inputs never seen, and checks what those return.

        Args:
          left_s: seconds that an order may take now.
          fewer: how many times more threads work for the reference than for the candidate; at least 1.
          memory: of the GPU, if there is one.

        Raises:
          Failure: an output is wrong.
        """
        timing, reference = self._verdict.timing, self._reference
        assert timing is not None
        with self._blamed("timing", self._job.options.time_s):
            try:
                if self._job.task.device == "cpu":
                    eager_ms = timing.baselines["eager"].median_ms
                    parts = on_host(reference, self._candidate, eager_ms, left_s())
                    self.memory_is_open = isinstance(parts[1], LeftOutputs)
                    if not self.memory_is_open and not (reference.changes or reference.aliases):
                        self._verdict.notes.append("audited with copies of outputs: memory of jails cannot be read here")
                elif self._on_gpu is None:
                    self._verdict.notes.append("the timing was not held against calls on fresh inputs")
                    return
                else:
                    parts = self._on_gpu.blocks, self._on_gpu.theirs, self._on_gpu.ours
                rounds = self._audits(*parts, left_s, fewer)
                memory_ms = memory.likely_ms(reference.traffic) if memory and reference.traffic else 0.0
                ruled, own, eager = rule_rounds(timing, rounds, replayed=self.replays, memory_ms=memory_ms)
            except OutputsLost as error:
                raise Failure("runtime_error", f"what its timed calls returned cannot be read: {error}") from error
            except AuditFailed as failed:
                what = "a timed call on inputs it had not seen is wrong"
                self._fail_late(what, failed.trial, failed.got, failed.expected, failed.others)
        audited = Audited(candidate=own.as_span(), eager=eager.as_span(), replayed=self.replays)
        self._verdict.timing = ruled.model_copy(update={"audited": audited})
        if ruled.bound_by == RULED_BY:
            self._verdict.notes.append(
                f"calls on inputs it had not seen took {own.median:.3g} ms, the reference's "
                f"{eager.median:.3g} ms; "
                f"on inputs it knew {timing.candidate.median_ms:.3g} ms were measured"
            )

    def _audits(self, blocks, theirs, ours, left_s: Callable[[], float], fewer: float) -> Iterator[Audit]:
        """Audits as they are asked for, each on blocks that no process has seen: on a CPU one, on a GPU up to `GPU_ROUNDS`."""
        rng = random.Random(secrets.randbits(64))
        for number in range(1 if self._on_gpu is None else GPU_ROUNDS):
            if number:
                blocks = self._on_gpu.draw(GPU_PLANS["full"].audit_blocks)
            found = audit(blocks, theirs, ours, lambda expected, got: compare(expected, got, self._tolerance), left_s, rng)
            found.fewer = fewer
            yield found

    def _fail_late(
        self,
        what: str,
        trial: Trial,
        got: list[torch.Tensor],
        right: list[torch.Tensor],
        others: Sequence[list[torch.Tensor]] = (),
    ) -> None:
        """Ends the evaluation for a wrong result; a replayed one is a matter of integrity. Raises Failure."""
        self._verdict.timing = None
        self._known += others
        self._check_replay(what, got, right)
        self._verdict.trials.append(trial)
        raise Failure("incorrect", feedback.failed(f"wrong result: {what}: {trial.reason}", ""))

    def _check_replay(self, what: str, got: list[torch.Tensor], right: list[torch.Tensor]) -> None:
        """Raises Failure if a wrong output equals what another call had to return.

        Outputs that are much the same for all inputs prove nothing.
        """
        for number, known in enumerate(self._known):
            if compare(known, got, self._tolerance).ok and not compare(right, known, self._tolerance).ok:
                evidence = f"{what}: it equals the output of an earlier call (input set {number})"
                raise Failure(
                    "integrity",
                    f"replayed output: {evidence}",
                    Finding(rule="replayed_output", evidence=evidence),
                )

    def _judge(self, expected: Outputs, got: Outputs) -> Trial:
        trial = compare(expected.tensors, got.tensors, self._tolerance)
        if not trial.ok:
            return trial
        changed = got.changed - self._reference.changes
        if changed:
            return Trial(ok=False, reason=f"it changes its input {min(changed)}, the reference does not")
        aliased = got.aliased - self._reference.aliases
        if aliased:
            return Trial(ok=False, reason=f"it returns its input {min(aliased)} instead of a new tensor")
        return trial

    def _call(self, command: str, timeout_s: float, **order) -> Outputs:
        limit = self._reference.max_output_bytes
        message = self._candidate.call(
            command,
            timeout_s,
            max_bytes=limit,
            reply_bytes=limit + (1 << 20),
            **self._candidate.carrier.wanted,
            **order,
        )
        if message.header.get("too_large"):
            shapes = str(message.header.get("shapes"))[:200]
            raise Failure(
                "incorrect", feedback.failed("wrong result: the outputs are far too large, shapes", shapes)
            )
        try:
            return read_outputs(self._candidate, message)
        except MALFORMED as error:
            raise Failure("runtime_error", f"the process sent a malformed reply ({str(error)[:300]})") from error

    def _blamed(self, doing: str, limit_s: float):
        return blamed_on_candidate(self._candidate, doing, limit_s, self._job.options.memory_bytes)


def _growth(usual: list[torch.Tensor], now: list[torch.Tensor]) -> float:
    """How many times larger outputs are than usual; never below 1."""
    ratios = [1.0]
    for before, after in zip(usual, now, strict=True):
        if after.is_floating_point() and after.shape == before.shape:
            sizes = [torch.linalg.vector_norm(tensor.to(torch.float32)).item() for tensor in (before, after)]
            ratios.append(sizes[1] / sizes[0] if sizes[0] > 0 else 1.0)
    return max(ratios)
