"""Prompts in, sampled messages out: what stands between trajectories, which hold tokens, and the sampler, which draws them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from dk_jax.generation.requests import Conversation
from dk_jax.generation.sampler import Sampler
from dk_jax.generation.tokenizer import Codec
from dk_jax.models.config import AGENTS
from dk_jax.rollout.trajectory import Trajectory, Turn


@dataclasses.dataclass(kw_only=True)
class Speaker:
    """Turns prompts into sampled messages for one set of parameters."""

    sampler: Sampler
    params: Any
    codec: Codec
    max_context_tokens: int
    temperature: float | None = None  # the sampler's own, or another one such as 0
    kept: dict[int, tuple[Trajectory, Conversation]] = dataclasses.field(default_factory=dict, repr=False)
    """Conversations whose keys and values are kept, by their trajectory's identity."""

    def fits(self, prompt: str, max_new: int) -> bool:
        """Whether a first prompt leaves room for `max_new` tokens; prompts that hold what models wrote may not."""
        return len(self.codec.open_turn(prompt, first=True)) + max_new <= self.max_context_tokens

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
        """Appends prompt and sampled answer to each trajectory, in place; `keep` says that they will go on, for which their keys and
        values are kept until a call without it. `fresh`: each prompt opens a conversation of its own, a new sequence of its trajectory.

        Returns, for each, whether there was room; a trajectory without room for `max_new` more tokens is left as it was.
        """
        rows, room, fed, conversations = [], [], [], []
        for trajectory, prompt in zip(trajectories, prompts, strict=True):
            before = [] if fresh else trajectory.tokens
            tokens = self.codec.open_turn(prompt, first=not before)
            if before and before[-1] != self.codec.eos_id:
                tokens = [self.codec.eos_id, *tokens]  # the message before was cut off: close it
            fits = len(before) + len(tokens) + max_new <= self.max_context_tokens
            if not fits and not trajectory.tokens:
                raise ValueError(
                    f"the first prompt of task {trajectory.task!r} ({trajectory.agent}) has {len(tokens)} tokens; with {max_new} new "
                    f"ones it passes rollout.max_context_tokens={self.max_context_tokens}. Raise that number or leave the task out."
                )
            room.append(fits)
            if fits:
                _, conversation = self.kept.get(id(trajectory), (None, None))
                if conversation is not None and conversation.tokens != before:
                    conversation = None
                conversations.append(conversation)
                fed.append((tokens, tokens if conversation else [*before, *tokens]))
                rows.append(trajectory)
        self.kept = {}
        if not rows:
            if not keep:
                self.sampler.rest()
            return room
        kept = [seed for seed, fits in zip(seeds, room, strict=True) if fits]
        samples = self.sampler.sample(
            self.params,
            [given for _, given in fed],
            [AGENTS.index(t.agent) for t in rows],
            kept,
            max_new_tokens=max_new,
            temperature=self.temperature,
            conversations=conversations,
            keep=keep,
        )
        for trajectory, (tokens, _), sample in zip(rows, fed, samples, strict=True):
            if fresh:
                trajectory.start_sequence()
            trajectory.append_prompt(tokens)
            if sample.conversation is not None:
                self.kept[id(trajectory)] = trajectory, sample.conversation
            trajectory.append_sample(sample.tokens, sample.logp_sample)
            trajectory.turns.append(Turn(text=self.codec.decode(sample.tokens), stop=sample.stop))
        return room
