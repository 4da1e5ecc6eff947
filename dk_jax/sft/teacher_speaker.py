"""A model behind an endpoint in the place of the policy: it gets the prompts that the policy would get and speaks in its stead.

`EndpointSpeaker` has what episodes need of `dk_jax.rollout.speaker.Speaker`, with texts where that has tokens: trajectories get their turns,
but no tokens and no log-probs, so nothing can be learned from them by RL.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dk_jax.agents.text import after_thinking
from dk_jax.interop.endpoint import Answer, ChatRequest, Endpoint, estimate_tokens
from dk_jax.rollout.trajectory import Trajectory, Turn

TURN_TOKENS = 8
"""Of a chat template around each message, about."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """A prompt, the answer to it as later prompts and samples show it, and the answer as it came."""

    prompt: str
    shown: str
    answer: Answer


class LengthsAlone:
    """In the place of a codec where only numbers of tokens are asked for: as many tokens as are estimated, none of them any particular one."""

    def encode(self, text: str) -> Sequence[int]:
        return range(estimate_tokens(text))


@dataclasses.dataclass(kw_only=True)
class EndpointSpeaker:
    """Turns prompts into an endpoint's messages.

    Attributes:
        max_tokens: longest answer, reasoning included.
        max_context_tokens: room for a conversation of the model that is to learn from this one, by `estimate_tokens`; a prompt that does
            not leave it the room that its own answer may take is not asked.
        temperature, top_p, extra: see ChatRequest.
        shown: what the conversation goes on with for a message; by default the message without its reasoning.
        conversations: what was said in each trajectory, by its identity.
        codec: tells how long texts are, about.
    """

    endpoint: Endpoint
    max_tokens: int
    max_context_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shown: Callable[[str], str] = lambda text: after_thinking(text).strip()
    conversations: dict[int, tuple[Trajectory, list[Exchange]]] = dataclasses.field(default_factory=dict, repr=False)

    codec: LengthsAlone = dataclasses.field(default_factory=LengthsAlone, repr=False)

    def conversation(self, trajectory: Trajectory) -> list[Exchange]:
        """What was said in a trajectory so far."""
        return self.conversations.setdefault(id(trajectory), (trajectory, []))[1]

    def fits(self, prompt: str, max_new: int) -> bool:
        """Whether a first prompt leaves room for `max_new` tokens, about."""
        return self._tokens([prompt]) + max_new <= self.max_context_tokens

    def speak(
        self,
        trajectories: Sequence[Trajectory],
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        max_new: int,
        keep: bool = False,
        fresh: bool = False,
    ) -> list[bool]:
        """Appends the endpoint's answer to each trajectory, in place. See Speaker.speak.

        Args:
            seeds: which of several answers to the same conversation is wanted.
            max_new: tokens of the learning model's own answer, for which there must be room.
            keep: nothing is kept from call to call but texts.
            fresh: each prompt opens a conversation of its own.

        Returns:
            For each whether it was answered. One that was not, for want of room, money or a usable answer, is left as it was; but a
            trajectory of one turn (selection, summary) then has an empty one, whose `stop` is the reason.

        Raises:
            EndpointError: see Endpoint.ask.
        """
        before = [[] if fresh else list(self.conversation(t)) for t in trajectories]
        texts = [[*(text for e in said for text in (e.prompt, e.shown)), prompt] for said, prompt in zip(before, prompts, strict=True)]
        room = [self._tokens(parts) + max_new <= self.max_context_tokens for parts in texts]
        answers = iter(
            self.endpoint.ask(
                [
                    ChatRequest(
                        messages=tuple(("assistant" if i % 2 else "user", text) for i, text in enumerate(parts)),
                        max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, extra=self.extra, sample=seed,
                    )
                    for parts, seed, fits in zip(texts, seeds, room, strict=True)
                    if fits
                ]
            )
        )  # fmt: skip
        answered = []
        for trajectory, prompt, fits in zip(trajectories, prompts, room, strict=True):
            answer = next(answers) if fits else None
            problem = answer.problem if answer is not None else "context"
            answered.append(not problem)
            if not problem:
                self.conversation(trajectory).append(Exchange(prompt=prompt, shown=self.shown(answer.text), answer=answer))
                trajectory.turns.append(Turn(text=answer.text, stop="eos"))
            elif trajectory.agent != "policy":
                trajectory.turns.append(Turn(text="", stop=problem))
        return answered

    def _tokens(self, texts: Sequence[str]) -> int:
        return sum(estimate_tokens(text) + TURN_TOKENS for text in texts)
