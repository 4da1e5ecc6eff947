"""The cold start's validation split: samples of tasks that it does not train on, and the loss on them, agent by agent.

A task's samples are all on one side, so that no kernel that is imitated is a validation answer in another order of turns. With shares
of the agents (`sft.shares`) the loss by which the best checkpoint is kept is the mean of the agents' losses by these shares, as the
training's own is on average; without them it is the mean over all imitated tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dk_jax.models.config import AGENTS
from dk_jax.models.log_probs import token_log_probs
from dk_jax.models.lora import combine
from dk_jax.models.sharding import shard_batch
from dk_jax.rollout.trajectory import derive_seed
from dk_jax.sft.samples import Sample
from dk_jax.train.batch import Row, microbatches
from dk_jax.train.model import Model


def split(samples: Sequence[Sample], share: float, *, seed: int) -> tuple[list[Sample], list[Sample]]:
    """(training, validation): about `share` of the tasks are kept for validation, the same for the same tasks and seed.

    Of each sort of task, by which agents it has samples of, `share` is taken, at least one task where there are two: so every agent
    that has samples of two tasks has some in validation.

    Args:
        share: in [0, 1); 0 keeps none.

    Raises:
        ValueError: a share out of its range.
    """
    if not 0 <= share < 1:
        raise ValueError(f"sft.validation_share is {share}: give a share of the tasks in [0, 1)")
    agents: dict[str, set[str]] = {}
    for sample in samples:
        agents.setdefault(sample.task, set()).add(sample.agent)
    sorts: dict[tuple[str, ...], list[str]] = {}
    for task, own in agents.items():
        sorts.setdefault(tuple(sorted(own)), []).append(task)
    kept: set[str] = set()
    for tasks in sorts.values():
        count = min(max(1, round(share * len(tasks))), len(tasks) - 1) if share else 0
        kept |= set(sorted(tasks, key=lambda name: derive_seed(seed, "sft-validation", name))[:count])
    return [s for s in samples if s.task not in kept], [s for s in samples if s.task in kept]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validation:
    """The loss on rows that are not trained on.

    Attributes:
        rows: their loss marks the imitated tokens.
        model: static part, frozen parameters and mesh.
        microbatch, microbatch_tokens, length_step: shapes of the batches, as the updates'.
        shares: weights of the agents' losses; all 0 or empty for the mean over tokens.
    """

    rows: Sequence[Row]
    model: Model
    microbatch: int
    length_step: int
    microbatch_tokens: int = 0
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def losses(self, trainable: Any) -> dict[str, float]:
        """`validation_loss` and `validation_loss_AGENT` in nats a token, for each agent that has rows.

        Raises:
            FloatingPointError: a loss that is not finite.
        """
        mesh = self.model.mesh
        whole = NamedSharding(mesh, PartitionSpec())
        total, tokens = dict.fromkeys(AGENTS, 0.0), dict.fromkeys(AGENTS, 0.0)
        with jax.set_mesh(mesh) if mesh.size > 1 else nullcontext():
            batches = microbatches(
                [dataclasses.replace(row, weight=1.0) for row in self.rows], size=self.microbatch, step=self.length_step,
                tokens=self.microbatch_tokens,
            )  # fmt: skip
            for batch in batches:
                found = jax.device_get(_sums(self.model.static, whole, trainable, self.model.frozen, shard_batch(mesh, batch)))
                for i, agent in enumerate(AGENTS):
                    total[agent] += float(found[0][i])
                    tokens[agent] += float(found[1][i])
        means = {agent: total[agent] / tokens[agent] for agent in AGENTS if tokens[agent]}
        weights = {agent: self.shares.get(agent, 0.0) for agent in means}
        if not any(weights.values()):
            weights = {agent: tokens[agent] for agent in means}
        loss = sum(weights[agent] * means[agent] for agent in means) / sum(weights.values())
        if not math.isfinite(loss):
            raise FloatingPointError(f"the validation loss is {loss} ({means}): lower sft.lr, and start the cold start again")
        return {"validation_loss": loss} | {f"validation_loss_{agent}": mean for agent, mean in means.items()}


@partial(jax.jit, static_argnums=(0, 1))
def _sums(static, whole: NamedSharding, trainable, frozen, batch) -> jax.Array:
    """f32[2, agents]: sums over imitated tokens of -log p, and the tokens' numbers; every process reads all of it."""
    scored = token_log_probs(static, combine(trainable, frozen), batch["tokens"], batch["lengths"], batch["agents"])
    mask = batch["mask"] * batch["weight"][:, None]
    rows, counts = (-scored.log_probs * mask).sum(-1), mask.sum(-1)
    of = jax.nn.one_hot(batch["agents"], len(AGENTS))
    return jax.lax.with_sharding_constraint(jnp.stack([rows @ of, counts @ of]), whole)
