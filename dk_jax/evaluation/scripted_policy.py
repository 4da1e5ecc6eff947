"""The generators' own kernels of the built-in tasks in the policy's place: an evaluation whose right answer is known.

    expert   of the kernels meant to be good, the one with the most techniques; further samples are the next ones
    naive    kernels meant to be slow, in the generator's order
             (both: of the learnable set in the order of dk_jax.sft.expert)
    wrong    kernels meant to be wrong, then those meant to be broken, in the generator's order

Sample m hands in kernel m, from the first again after the last, at every turn the same. What they are meant to be is the generator's
word; the sandbox says what they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from dk_jax.agents import policy
from dk_jax.agents.text import Style, TaskView
from dk_jax.evaluation.kernel_folder import MISSING
from dk_jax.rollout.trajectory import Trajectory, Turn
from dk_jax.sft.corpus import Variant
from dk_jax.sft.expert import ranked
from dk_jax.tasks.task import Task

Kind = Literal["expert", "naive", "wrong"]
KINDS: dict[str, tuple[str, ...]] = {"expert": ("good",), "naive": ("slow",), "wrong": ("wrong", "broken")}
"""Intents of each kind's kernels, in the order in which they are handed in."""


class ScriptedPolicyError(ValueError):
    """The generators have no kernels for these tasks."""


def kernels_of(kind: Kind, variants: Sequence[Variant], family: str = "") -> list[str]:
    """Sources of a kind among the generated kernels of a task of `family`, in the order of the samples that hand them in."""
    own = [v for intent in KINDS[kind] for v in variants if v.intent == intent]
    return [v.source for v in (own if kind == "wrong" else ranked(kind, family, own))]


class ScriptedPolicy:
    """Speaks by handing in generated kernels. It has what episodes need of `dk_jax.rollout.speaker.Speaker`.

    Args:
        kind: which of them.
        tasks: those that it will be asked about.
        views: what the prompts say of each, by name.
        variants: the generator of the language (dk_jax.train.setup.kernel_variants).
        style: of the messages.

    Attributes:
        kernels: sources by task; [] where the generator has none of this kind.

    Raises:
        ScriptedPolicyError: a task was read from a file, for which nothing is generated.
    """

    def __init__(
        self, kind: Kind, tasks: Sequence[Task], views: Mapping[str, TaskView], variants: Callable[[Task], Sequence[Variant]], *, style: Style
    ):
        self.kind, self._views, self._style = kind, views, style
        if from_files := [task.name for task in tasks if task.spec is None]:
            raise ScriptedPolicyError(
                f"the policy {kind!r} hands in generated kernels, and none are generated for tasks from files, such as {from_files[0]}: "
                "use the built-in tasks (tasks.source='builtin') or another policy"
            )
        self.kernels = {task.name: kernels_of(kind, variants(task), task.family) for task in tasks}

    @property
    def digest(self) -> str:
        """Of all kernels, in order."""
        text = "\x1f".join(source for name in sorted(self.kernels) for source in (name, *self.kernels[name]))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def fits(self, prompt: str, max_new: int) -> bool:
        """Nothing is read of a prompt."""
        return True

    def speak(
        self, trajectories: Sequence[Trajectory], prompts: Sequence[str], seeds: Sequence[int], *, max_new: int, keep: bool = False,
        fresh: bool = False,
    ) -> list[bool]:  # fmt: skip
        """Appends to each trajectory its sample's kernel as a message. See Speaker.speak.

        Returns:
            For each whether there was one; without any of this kind the first turn is an empty one whose `stop` is MISSING.
        """
        found = []
        for trajectory in trajectories:
            own, first = self.kernels[trajectory.task], not trajectory.turns
            if own:
                source = own[trajectory.member % len(own)]
                text = policy.format(source, self._views[trajectory.task], style=self._style)
                trajectory.turns.append(Turn(text=text, stop="eos"))
            elif first:
                trajectory.turns.append(Turn(text="", stop=MISSING, error=f"the generator has no kernel of kind {self.kind!r} for this task"))
            found.append(bool(own) or first)
        return found
