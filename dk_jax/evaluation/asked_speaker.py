"""An endpoint in an evaluation: every answer counts, and those that may still be had are told apart from those that will never be."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dk_jax.interop.endpoint import UNANSWERED, UNASKED, Answer, ChatRequest, Endpoint
from dk_jax.rollout.trajectory import Trajectory, Turn
from dk_jax.sft.teacher_speaker import EndpointSpeaker, Exchange


class Unanswered(Exception):
    """An answer is missing that the endpoint may still give; `reason` as in an Answer's `problem`."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class Listening:
    """An endpoint whose last answers are kept by the message and the `sample` that they were asked for."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        self.heard: dict[tuple[str, int], Answer] = {}

    def ask(self, requests: Sequence[ChatRequest]) -> list[Answer]:
        self.heard = {}
        answers = self.endpoint.ask(requests)
        self.heard = {(request.messages[-1][1], request.sample): answer for request, answer in zip(requests, answers, strict=True)}
        return answers


@dataclasses.dataclass(kw_only=True)
class AskedSpeaker(EndpointSpeaker):
    """An EndpointSpeaker whose every answer counts: one that is cut, empty or withheld is a turn without a kernel, as of any model. Only where
    the conversation has no room left does a trajectory end before its time.

    Attributes:
        endpoint: a Listening one; of equal prompts within a call seeds are distinct.
        unfinished: trajectories that have not got an answer which the endpoint may still give, and why.
        insist: such a one raises Unanswered.
    """

    unfinished: list[tuple[Trajectory, str]] = dataclasses.field(default_factory=list, repr=False)
    insist: bool = False

    def speak(self, trajectories, prompts, seeds, *, max_new, keep=False, fresh=False):
        """See EndpointSpeaker.speak; False only where there is no room, or where the trajectory is unfinished."""
        answered = super().speak(trajectories, prompts, seeds, max_new=max_new, keep=keep, fresh=fresh)
        for i, (trajectory, prompt, seed) in enumerate(zip(trajectories, prompts, seeds, strict=True)):
            answer = self.endpoint.heard.get((prompt, seed))
            if answer is None or not answer.problem:
                continue
            if answer.problem in (UNASKED, UNANSWERED):
                if self.insist:
                    raise Unanswered(answer.problem)
                self.unfinished.append((trajectory, answer.problem))
            elif trajectory.agent != "policy":
                self.conversation(trajectory).append(Exchange(prompt=prompt, shown="", answer=answer))  # of no use, and paid for
            elif not (answer.problem == "too_long" and trajectory.turns):
                said = f"the answer was of no use ({answer.problem}): {answer.detail}"
                trajectory.turns.append(Turn(text=answer.text, stop=answer.problem, error=said))
                self.conversation(trajectory).append(Exchange(prompt=prompt, shown=self.shown(answer.text) or "(no answer)", answer=answer))
                answered[i] = True
        return answered
