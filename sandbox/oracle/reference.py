"""A task's reference in a runner of its own, kept warm; never in one process with a candidate."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sandbox.build.signature import KernelSignature, SignatureError, make_signature
from sandbox.jail.faults import JailDied, JailError, JailMemory, JailReply, JailTimeout, ZygoteLost
from sandbox.jail.frames import Message
from sandbox.jail.jailed import Runner
from sandbox.jail.tensors import decode, describe, unpack
from sandbox.oracle.calm import Calm
from sandbox.oracle.fresh import USES, Pool
from sandbox.protocol import TaskSpec
from sandbox.verdict.correctness import Tolerance, all_finite, compare, reference_problem
from sandbox.verdict.rounding import Rounding, rounding

if TYPE_CHECKING:
    from sandbox.oracle.roofline import Traffic
    from sandbox.oracle.work import Work

MAX_STATE_BYTES = 16 << 30
MAX_INPUT_BYTES = 8 << 30
MAX_OUTPUT_BYTES = 8 << 30
MAX_ROUNDING_BYTES = 64 << 20
"""Outputs larger than this are not computed in float64."""
SLACK_BYTES = 1 << 16
EXAMPLE_SLOT = 1000
FEW_NUMBERS, MOST_DRAWS = 64, 8
"""Slot of the inputs that only serve to get to know the task."""


class TaskRejected(RuntimeError):
    """The task itself is at fault: no `Model`, it fails, its output is random, ... The text says what to
    change.

    Attributes:
      out_of_memory: it ran out of device or host memory, which may be the doing of others.
    """

    def __init__(self, text: str, *, out_of_memory: bool = False):
        super().__init__(text)
        self.out_of_memory = out_of_memory


@dataclass(frozen=True)
class Inputs:
    """Arguments of one trial: `args` as encoded by `sandbox.jail.tensors`, and their tensors, on the GPU where the
    runner shares memory with the oracle."""

    args: list[Any]
    tensors: list[torch.Tensor]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Outputs:
    """What a call returned, with the numbers of the tensor arguments it changed and of those it returned."""

    tensors: list[torch.Tensor]
    is_tuple: bool
    changed: frozenset[int]
    aliased: frozenset[int]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Reference:
    """Runs one task's reference.

    Args:
      task: the task.
      runner: a fresh runner; owned and closed by this object.
      seed: of the weights; the candidate is constructed under the same.
      load_s, check_s: deadlines of constructing and of each call.
      share_memory: told, with the runner, how many bytes the inputs or the outputs of a call take at most.

    Attributes:
      traffic: what a call must move, once someone has found out (`sandbox.oracle.roofline`).
      work: what a call moves and computes, where `work_is_known` and it could be counted (`sandbox.oracle.work`).
      calm: its times in the timings so far.

    Raises:
      TaskRejected: the source fails or does not fit the KernelBench form.
    """

    def __init__(
        self,
        task: TaskSpec,
        runner: Runner,
        *,
        seed: int,
        load_s: float,
        check_s: float,
        share_memory: Callable[[Runner, int], None] = lambda runner, n_bytes: None,
    ):
        self.task, self.runner, self.seed, self._check_s = task, runner, seed, check_s
        self._share_memory = share_memory
        self._pool: Pool | None = None
        self.traffic: Traffic | None = None
        self.work: Work | None = None
        self.work_is_known = False
        self.calm = Calm()
        try:
            self._get_to_know(load_s)
        except BaseException:
            runner.close()
            raise

    def _get_to_know(self, load_s: float) -> None:
        message = self.order(
            "load_reference",
            load_s,
            source=self.task.reference,
            entry_point=self.task.entry_point,
            dtype=self.task.dtype,
            device=self.task.device,
            seed=self.seed,
            reply_bytes=MAX_STATE_BYTES,
        )
        header, tensors = message.header, unpack(message.header["tensors"], message.buffers)
        self.init, count = header["init"], header["init_tensors"]
        self.init_tensors, self.state = tensors[:count], tensors[count:]
        example = self.inputs(seed=self.seed + 1, slot=EXAMPLE_SLOT)
        first = self.run(EXAMPLE_SLOT, seed=1)
        again = self.run(EXAMPLE_SLOT, seed=2)
        if (
            not first.changed
            and not compare(first.tensors, again.tensors, Tolerance(atol=1e-2, rtol=1e-2)).ok
        ):
            raise TaskRejected("the reference's output is random: two calls on the same inputs differ")
        # Twice the outputs: they also come in float64, and of a candidate so many are looked at.
        self.traffic_bytes = max(example.bytes, 2 * first.bytes) + SLACK_BYTES
        self._share_memory(runner=self.runner, n_bytes=self.traffic_bytes)
        self.rounding = self._rounding(first, load_s) if not first.changed else None
        self.outputs = [describe(tensor) for tensor in first.tensors]
        self.is_tuple, self.changes, self.aliases = first.is_tuple, first.changed, first.aliased
        self.input_shapes = [describe(tensor) for tensor in example.tensors]
        self.max_output_bytes = 2 * first.bytes + SLACK_BYTES
        self.signature_error = ""
        self.signature: KernelSignature | None = None
        try:
            values = decode(example.args, example.tensors)
            self.signature = make_signature(
                header["arguments"],
                [_shape_only(value) for value in values],
                [(name, describe(tensor)) for name, tensor in zip(header["state"], self.state, strict=True)],
                self.outputs,
                self.is_tuple,
            )
        except SignatureError as error:
            self.signature_error = str(error)

    def _rounding(self, first: Outputs, timeout_s: float) -> list[Rounding] | None:
        """The error of outputs on the example against a run in float64; None where it has none (a type or an operation that double
        precision lacks, a source that fixes another type, an output too large). The error of few numbers may be small by chance,
        so where an output has less than `FEW_NUMBERS` further examples are drawn."""
        # Where the runner shares device memory by now, outputs lie there and not where the first did.
        value = first if self.task.device == "cpu" else self.run(EXAMPLE_SLOT, seed=1)
        if value.bytes > MAX_ROUNDING_BYTES:
            return None
        found = self._rounding_on_example(value, timeout_s)
        fewest = max(1, min(tensor.numel() for tensor in first.tensors))
        for draw in range(1, min(MOST_DRAWS, -(-FEW_NUMBERS // fewest)) if found else 0):
            self.inputs(seed=self.seed + 1 + draw, slot=EXAMPLE_SLOT)
            more = self._rounding_on_example(self.run(EXAMPLE_SLOT, seed=1), timeout_s)
            found = [one.or_worse(other) for one, other in zip(found, more, strict=True)] if more else found
        return found

    def _rounding_on_example(self, value: Outputs, timeout_s: float) -> list[Rounding] | None:
        """The error of `value`, the outputs on what is in the example's slot."""
        limit = 8 * value.bytes + SLACK_BYTES
        try:
            message = self.runner.call(
                "run_double",
                timeout_s,
                slot=EXAMPLE_SLOT,
                seed=1,
                max_bytes=limit,
                reply_bytes=2 * limit,
                **self.runner.carrier.wanted,
            )
        except JailReply:
            return None
        except (JailTimeout, JailMemory, JailDied) as error:
            raise TaskRejected(f"the reference breaks down in float64: {error}") from error
        exact = read_outputs(self.runner, message).tensors
        if [tensor.shape for tensor in exact] != [tensor.shape for tensor in value.tensors]:
            return None
        if not all(map(all_finite, (*exact, *value.tensors))):
            return None
        return [rounding(one, other) for one, other in zip(exact, value.tensors, strict=True)]

    @property
    def tolerance(self) -> Tolerance:
        """How near to the expected values is near enough for this task.

        With `tolerance="oracle"` both bounds follow from the reference's own rounding.
        """
        task = self.task
        if self.rounding is None:
            return Tolerance(atol=task.atol, rtol=task.rtol)
        if task.tolerance == "oracle":
            return Tolerance(bounds=tuple(one.bounds for one in self.rounding))
        return Tolerance(
            atol=task.atol,
            rtol=task.rtol,
            noise=tuple(one.relative_rms for one in self.rounding),
            floors=tuple(one.bounds[0] for one in self.rounding),
        )

    def inputs(self, seed: int, slot: int) -> Inputs:
        """Draws fresh inputs into a slot of the runner and returns a copy of them."""
        message = self.order(
            "inputs", self._check_s, seed=seed, slot=slot, reply_bytes=MAX_INPUT_BYTES, **self.runner.carrier.wanted
        )
        return Inputs(message.header["args"], self.runner.carrier.take(message))

    def run(self, slot: int, seed: int) -> Outputs:
        """Outputs on a slot's inputs. Raises TaskRejected when they contain NaN or are no tensors."""
        outputs = self.outputs_of(slot, seed)
        problem = reference_problem(outputs.tensors)
        if problem:
            raise TaskRejected(problem)
        return outputs

    def outputs_of(self, slot: int, seed: int) -> Outputs:
        """Outputs on a slot's inputs, whatever they are."""
        message = self.order(
            "run",
            self._check_s,
            slot=slot,
            seed=seed,
            check=True,
            max_bytes=MAX_OUTPUT_BYTES,
            reply_bytes=MAX_OUTPUT_BYTES + SLACK_BYTES,
            **self.runner.carrier.wanted,
        )
        return read_outputs(self.runner, message)

    def set_inputs(self, slot: int, inputs: Inputs) -> None:
        """Puts given inputs into a slot."""
        fields, buffers = self.runner.carrier.give(inputs.tensors)
        self.order("set_inputs", self._check_s, buffers=buffers, slot=slot, args=inputs.args, **fields)

    def forget(self) -> None:
        """Gives up the inputs of all slots and the device memory that is held beyond the model."""
        self.order("forget", self._check_s)

    def overwrite(self, slot: int, tensor: int, row: int, rows: torch.Tensor) -> None:
        """Changes rows of an input in place."""
        overwrite(self.runner, self._check_s, slot, tensor, row, rows)

    def pool(self, draw: Callable[[], Pool], *, use: bool = True) -> Pool:
        """Fresh inputs for the audit of a timing: those at hand, until they have served `USES` evaluations.
        Without `use` they are only made ready."""
        if self._pool is None or self._pool.uses >= USES:
            self._drop_pool()
            self._pool = draw()
        self._pool.uses += use
        return self._pool

    @property
    def pool_is_ready(self) -> bool:
        return self._pool is not None and self._pool.uses < USES

    def _drop_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def close(self) -> None:
        self._drop_pool()
        self.runner.close()

    @property
    def alive(self) -> bool:
        return self.runner.exit is None

    def order(self, command: str, timeout_s: float, **order) -> Message:
        """Sends an order to the runner; every failure is the task's."""
        try:
            return self.runner.call(command, timeout_s, **order)
        except JailReply as error:
            raise TaskRejected(
                f"the reference fails: {error}", out_of_memory=error.kind == "out_of_memory"
            ) from error
        except JailTimeout as error:
            raise TaskRejected(f"the reference took longer than {timeout_s:g} s ({command})") from error
        except JailMemory as error:
            raise TaskRejected(f"the reference {error}") from error
        except JailDied as error:
            raise TaskRejected(f"the reference broke down: {error}") from error


def overwrite(runner: Runner, timeout_s: float, slot: int, tensor: int, row: int, rows: torch.Tensor) -> None:
    """Has a runner change rows of one of a slot's tensors in place, in the buffer it has already used."""
    fields, buffers = runner.carrier.give([rows])
    runner.call("overwrite", timeout_s, buffers, slot=slot, tensor=tensor, row=row, **fields)


def read_outputs(runner: Runner, message: Message) -> Outputs:
    """Reads a runner's reply to `run` or `kept`; everything in it is a claim of the runner.

    Raises:
      ValueError: the reply is malformed.
    """
    header = message.header
    changed, aliased = header.get("changed", []), header.get("aliased", [])
    if not all(type(number) is int for number in (*changed, *aliased)):
        raise ValueError("malformed reply")
    return Outputs(
        runner.carrier.take(message),
        bool(header.get("is_tuple")),
        frozenset(changed),
        frozenset(aliased),
    )


class References:
    """The most recently used references, each warm in its runner. Not thread-safe."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._warm: OrderedDict[str, Reference] = OrderedDict()

    def get(self, task: TaskSpec, make: Callable[[], Reference]) -> Reference:
        """The warm reference of an equal task, else a new one from `make`; the least recently used one
        goes."""
        key = hashlib.sha256(task.model_dump_json(exclude={"name"}).encode()).hexdigest()
        found = self._warm.pop(key, None)
        if found is not None and not found.alive:
            found.close()
            found = None
        reference = found or make()
        self._warm[key] = reference
        while len(self._warm) > self._capacity:
            self._warm.popitem(last=False)[1].close()
        return reference

    def give_up(self, keep: Reference | None = None) -> bool:
        """Closes the least recently used one, but never `keep`; False if there is none to close."""
        for key, reference in list(self._warm.items()):
            if reference is not keep:
                del self._warm[key]
                reference.close()
                return True
        return False

    def discard(self, reference: Reference) -> None:
        """Closes a reference whose conversation may be out of step (an order was broken off)."""
        for key, warm in list(self._warm.items()):
            if warm is reference:
                del self._warm[key]
        try:
            reference.close()
        except JailError:
            return

    def close(self) -> None:
        """Closes all."""
        while self._warm:
            try:
                self._warm.popitem()[1].close()
            except ZygoteLost:
                continue


def _shape_only(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return describe(value)
    if isinstance(value, (list, tuple)):
        return [_shape_only(item) for item in value]
    return value
