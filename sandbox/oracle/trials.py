"""The correctness checks of one evaluation, before and after timing."""

from __future__ import annotations

import random
import secrets
import time

from sandbox.jail.spawn import Runner
from sandbox.jail.tensors import pack
from sandbox.oracle.draft import Draft, Job
from sandbox.oracle.failures import Failure, blamed_on_candidate
from sandbox.oracle.reference import Inputs, Outputs, Reference, overwrite, read_outputs
from sandbox.protocol import Finding, Trial
from sandbox.verdict import feedback
from sandbox.verdict.correctness import Tolerance, compare

TIMED_SLOTS = 3
"""Input sets that are kept and rotated through while timing."""
MANY_BYTES = 256 << 20
"""Inputs larger than this are held once, not once a slot."""


class Trials:
    """The correctness checks of one evaluation, before and after timing."""

    def __init__(self, job: Job, reference: Reference, candidate: Runner, verdict: Draft):
        self._job, self._reference, self._candidate, self._verdict = job, reference, candidate, verdict
        self._tolerance = Tolerance(atol=job.task.atol, rtol=job.task.rtol)
        self._inputs: dict[int, Inputs] = {}
        self._expected: dict[int, Outputs] = {}
        self._seed = secrets.randbits(40)

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
            slot = number % n_slots
            inputs = self._reference.inputs(secrets.randbits(40), slot)
            if inputs.bytes > MANY_BYTES:
                n_slots = 1
            entries, buffers = pack(inputs.tensors)
            with self._blamed("running", options.check_s):
                self._candidate.call(
                    "set_inputs",
                    max(0.001, deadline - time.monotonic()),
                    buffers,
                    slot=slot,
                    args=inputs.args,
                    tensors=entries,
                )
                got = self._call(
                    "run", max(0.001, deadline - time.monotonic()), slot=slot, seed=self._seed, check=True
                )
            expected = self._reference.run(slot, self._seed)
            trial = self._judge(expected, got)
            self._verdict.trials.append(trial)
            if not trial.ok:
                raise Failure(
                    "incorrect", feedback.incorrect(trial.reason, number, options.correctness_trials)
                )
            self._inputs[slot], self._expected[slot] = inputs, expected

    def check_kept(self, slot: int) -> None:
        """Checks the outputs of one timed call, chosen by the oracle. Raises Failure."""
        with self._blamed("timing", self._job.options.check_s):
            got = self._call("kept", self._job.options.check_s)
        trial = compare(self._expected[slot].tensors, got.tensors, self._tolerance)
        if not trial.ok and not self._reference.changes:
            self._fail_late("a timed call returned something else than the checked calls", trial, got, slot)

    def check_changed_inputs(self) -> None:
        """Changes a row of each input in place, in both runners, and compares once more. Raises Failure."""
        if self._reference.changes:
            return
        rng = random.Random(secrets.randbits(64))
        slot = self.slots[0]
        with self._blamed("running", self._job.options.check_s):
            for number, tensor in enumerate(self._inputs[slot].tensors):
                if tensor.dim() == 0 or tensor.shape[0] < 2 or tensor.numel() == 0:
                    continue
                # A row takes the place of another: whatever made the values valid holds for the copy too.
                source, target = rng.sample(range(tensor.shape[0]), 2)
                rows = tensor[source : source + 1]
                self._reference.overwrite(slot, number, target, rows)
                overwrite(self._candidate, self._job.options.check_s, slot, number, target, rows)
            got = self._call("run", self._job.options.check_s, slot=slot, seed=self._seed, check=False)
        expected = self._reference.run(slot, self._seed)
        trial = compare(expected.tensors, got.tensors, self._tolerance)
        if not trial.ok:
            self._fail_late("after its inputs changed in place the candidate is wrong", trial, got, slot)

    def _fail_late(self, what: str, trial: Trial, got: Outputs, slot: int) -> None:
        """A wrong result after timing is a replayed one if it equals what another call had to return."""
        self._verdict.timing = None
        for known, expected in self._expected.items():
            if compare(expected.tensors, got.tensors, self._tolerance).ok:
                evidence = f"{what}: it equals the output of an earlier call (input set {known})"
                raise Failure(
                    "integrity",
                    f"replayed output: {evidence}",
                    Finding(rule="replayed_output", evidence=evidence),
                )
        self._verdict.trials.append(trial)
        raise Failure("incorrect", f"wrong result: {what}: {trial.reason}")

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
            command, timeout_s, max_bytes=limit, reply_bytes=limit + (1 << 20), **order
        )
        if message.header.get("too_large"):
            shapes = str(message.header.get("shapes"))[:200]
            raise Failure(
                "incorrect", feedback.failed("wrong result: the outputs are far too large, shapes", shapes)
            )
        try:
            return read_outputs(message)
        except (ValueError, TypeError, AttributeError) as error:
            raise Failure("runtime_error", f"the process sent a malformed reply ({error})") from error

    def _blamed(self, doing: str, limit_s: float):
        return blamed_on_candidate(self._candidate, doing, limit_s, self._job.options.memory_bytes)
