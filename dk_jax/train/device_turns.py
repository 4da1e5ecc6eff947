"""Turns on the same devices for two threads, one that samples and one that learns: never two of their programs at once.

A sampler's call is one turn, each program of an update (a microbatch's gradient, the optimiser's step) another, so the learner waits for
one call at most and a call for one microbatch. Who samples comes first: what it makes the sandbox then judges, which is when the learner
has the devices to itself.

Memory: what lies on the devices between turns adds up. While a microbatch is worked on, the sampler keeps its weights and, where
conversations will go on (several turns with rollout.context "full"), its caches of keys and values; they can't be given back for the
learner's turns, since what is fed to them again may differ in the last bit, and then what is sampled would depend on who came when.

Not in turns are programs of one device that take next to no memory: rewards and advantages (dk_jax.train.credit), the copies that a
checkpoint is written from.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from dk_jax.train.clock import StepClock

Runner = Callable[..., Any]
"""(program, *its arguments) -> its outputs: how a program is run."""


def at_once(program: Callable[..., Any], *arguments: Any) -> Any:
    """The program's outputs, which may still be computed: for whoever has the devices to itself."""
    return program(*arguments)


class Cancelled(RuntimeError):
    """Nobody wants what was to be sampled any more."""


class DeviceTurns:
    """Who may use the devices now. One thread samples; several may learn, at the same time (learner.streams).

    Args:
        clock: told of waiting ("collect_wait", "update_wait") and of learning ("update_turn").
    """

    def __init__(self, clock: StepClock):
        self._clock = clock
        self._changed = threading.Condition()
        self._sampling = self._learning = self._wanted = 0
        """Threads that sample and that learn now, and those that wait to sample."""
        self._over = False

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """A turn of a thread that samples.

        Raises:
            Cancelled: `cancel` was called, perhaps while it waited.
        """
        with self._changed:
            self._wanted += 1
            try:
                with self._clock.during("collect_wait"):
                    self._changed.wait_for(lambda: self._over or not (self._sampling or self._learning))
                if self._over:
                    raise Cancelled("nobody wants these rollouts any more")
                self._sampling += 1
            finally:
                self._wanted -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._sampling -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """A turn of a thread that learns; don't take one within another."""
        with self._changed, self._clock.during("update_wait"):
            self._changed.wait_for(lambda: not (self._sampling or self._wanted))
            self._learning += 1
        try:
            with self._clock.during("update_turn"):
                yield
        finally:
            with self._changed:
                self._learning -= 1
                self._changed.notify_all()

    def learn(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """The program's outputs, computed in a turn of this thread: a `Runner`."""
        with self.learning():
            return jax.block_until_ready(program(*arguments))

    def cancel(self) -> None:
        """Gives no more turns to sample; who waits for one, or asks for one later, gets Cancelled. A call that has its turn comes to its
        end."""
        with self._changed:
            self._over = True
            self._changed.notify_all()


class TurnSampler:
    """A sampler each of whose calls is a turn; all else is the sampler's own."""

    def __init__(self, sampler: Any, turns: DeviceTurns):
        self._sampler, self._turns = sampler, turns

    def sample(self, *arguments: Any, **options: Any) -> Any:
        with self._turns.sampling():
            return self._sampler.sample(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
