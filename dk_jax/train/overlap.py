"""Where each RL step's rollouts come from: made when they are asked for, or one step ahead, while the step before is learnt from.

    rl.staleness = 0   R_t+1 is made with theta_t and the library of step t, then theta_t+1 = update(theta_t, R_t+1)
    rl.staleness = 1   R_1 and R_2 are made with theta_0 and the library that it found; from then on

                           R_t+2 with theta_t and the library of step t    beside    theta_t+1 = update(theta_t, R_t+1)

What samples is thus given by the step alone, never by who was faster: with equal verdicts the run is the same, bit for bit. Tokens carry
the log-probs under the parameters that sampled them, so the loss's clipped ratio corrects for the step between (dk_jax.rl.losses); the
update's `ratio`, `kl`, `clip_fraction` and `gap` tell how much there was to correct.

While theta_t samples, the optimiser's step does not overwrite it. That costs the trainable parameters once more, on the devices from the
optimiser's step on until these rollouts are there (with mismatch rejection, until they are scored), and in every checkpoint, since a resumed
run has to make them again. What the devices hold besides while both go on: dk_jax.train.device_turns.

Errors: what goes wrong in the thread that makes rollouts is raised when they are asked for, when the step in work is final. Where the
learner stops, the thread is told to: it takes no further turn on the devices, its judge gives up (within one long poll of the sandbox's
client), and it is waited for, which with a call of the sampler in work takes as long as that call. Verdicts that arrived are in the journal.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
from ml_collections import ConfigDict

from dk_jax.rollout.episode import StepRollouts
from dk_jax.skills.record import Skill
from dk_jax.train.device_turns import Cancelled
from dk_jax.train.state import TrainState
from sandbox.client import SandboxUnavailable

log = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class Behaviour:
    """What makes a step's rollouts: the behaviour policy, and the skills that it is shown.

    Attributes:
        step: updates that its parameters have had.
        trainable: of its parameters those that are trained; None once let go.
        active: the library's active skills after that step.
    """

    step: int
    trainable: Any
    active: Sequence[Skill]

    def let_go(self) -> None:
        """Gives the parameters' memory back, if nobody else holds them."""
        self.trainable = None


Make = Callable[[Behaviour, int], StepRollouts]
"""Makes the rollouts of the step that follows so many others."""


class OnPolicy:
    """Rollouts made when they are asked for, with the parameters that then learn from them.

    Args:
        make: makes them.
        behaviour: what those of the step after a state are made with.
    """

    def __init__(self, make: Make, behaviour: Callable[[TrainState], Behaviour]):
        self._make, self._behaviour = make, behaviour

    def next(self, state: TrainState) -> tuple[StepRollouts, Behaviour]:
        """The rollouts of the step after `state`, and what made them."""
        behaviour = self._behaviour(state)
        return self._make(behaviour, state.step), behaviour

    def __enter__(self) -> OnPolicy:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is in work."""


class OneStepAhead:
    """Rollouts made in a thread of their own, one step ahead of those that are learnt from. Use as a context manager.

    Args:
        make: makes them, in the thread; its programs and the learner's take turns (dk_jax.train.device_turns).
        behaviour: what those of the step after a state are made with, where nothing is in work: at the start, or after a resume.
        present: the behaviour of a state itself, with the library as it is now.
        steps: how many steps there will be; none are made beyond.
        cancel: has `make` end soon, by any error; it is called where the learner stops and rollouts are in work.
    """

    def __init__(
        self,
        make: Make,
        behaviour: Callable[[TrainState], Behaviour],
        present: Callable[[TrainState], Behaviour],
        *,
        steps: int,
        cancel: Callable[[], None],
    ):
        self._make, self._behaviour, self._present, self._steps, self._cancel = make, behaviour, present, steps, cancel
        self._work: _Work | None = None

    def next(self, state: TrainState) -> tuple[StepRollouts, Behaviour]:
        """The rollouts of the step after `state`, and what made them; those of the step after that are begun, with `state`.

        Raises:
            What making them raised.
        """
        if self._work is None:
            self._begin(self._behaviour(state), state.step)
        work = self._work
        error = work.wait()
        self._work = None
        if error is not None:
            raise error
        if state.step + 1 < self._steps:
            self._begin(self._present(state), state.step + 1)
        return work.rollouts, work.behaviour

    def _begin(self, behaviour: Behaviour, step: int) -> None:
        self._work = _Work(self._make, behaviour, step)  # known before it is started: an interrupt may come any time
        self._work.start()

    def __enter__(self) -> OneStepAhead:
        return self

    def __exit__(self, *_: object) -> None:
        if self._work is None:
            return
        self._cancel()
        error = self._work.give_up()
        if error is not None and not isinstance(error, Cancelled | SandboxUnavailable):
            log.warning("the rollouts of step %d, which were in work, failed as well: %r", self._work.step + 1, error)
        self._work = None


class _Work:
    """Rollouts that a thread makes, once it is started."""

    def __init__(self, make: Make, behaviour: Behaviour, step: int):
        self.behaviour, self.step = behaviour, step
        self._done: Future[StepRollouts] = Future()
        # A second interrupt need not wait for it: it does not keep the process.
        self._thread = threading.Thread(target=self._run, args=(make,), name=f"rollouts-of-step-{step + 1}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self, make: Make) -> None:
        if not self._done.set_running_or_notify_cancel():
            return
        try:
            self._done.set_result(make(self.behaviour, self.step))
        except BaseException as error:
            self._done.set_exception(error)

    def wait(self) -> BaseException | None:
        """Until the thread has ended; returns what it raised."""
        error = self._done.exception()
        self._thread.join()
        return error

    def give_up(self) -> BaseException | None:
        """As `wait`, but nothing is begun that has not begun yet."""
        return None if self._done.cancel() else self.wait()

    @property
    def rollouts(self) -> StepRollouts:
        """What was made, after `wait`."""
        return self._done.result()


def warn_of_shared_clock(cfg: ConfigDict, mesh: jax.sharding.Mesh) -> None:
    """Where kernels are timed on the very devices that learn meanwhile, their speedups are not to be trusted; that is said."""
    kind, _, number = cfg.sandbox.device.partition(":")
    learning = {(device.platform, device.local_hardware_id) for device in mesh.devices.flat}
    shared = any(platform == "cpu" for platform, _ in learning) if kind == "cpu" else ("gpu", int(number or 0)) in learning
    if shared and cfg.sandbox.timing != "none":
        log.warning(
            "rl.staleness=1 and kernels are timed on %s, where updates are computed meanwhile: timings will be noisy, and off. Give the "
            "sandbox a device of its own (sandbox.device, learner.mesh), or set rl.staleness=0",
            cfg.sandbox.device,
        )
