"""Rewards of the three agents (DESIGN 3.4), from judged numbers alone.

The sandbox computes the policy's turn reward itself (`reward.total`); `PolicyReward` and `MilestoneReward` are the
same rules on arrays, for replays under other weights and for tests. Nothing here knows about tokens.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyReward:
    """r = C * (w_correct + w_speed * min(speedup, cap) + w_coverage * PR); 0 when not correct.

    Attributes:
        w_correct: weight of being correct (C).
        w_speed: weight of the speedup over eager.
        w_coverage: weight of the candidate's own share of device time (PR).
        speedup_cap: speedups above this earn no more.

    Source: daVinci-kernel (arXiv 2606.16497) with 0.5, 0.5, 0.5, cap 6; Dr.Kernel (arXiv 2602.05885) with 1, 1, 1, cap 3; Kevin
    (arXiv 2507.11948) with 0.3, 1, 0 and no cap.
    """

    w_correct: float = 0.5
    w_speed: float = 0.5
    w_coverage: float = 0.5
    speedup_cap: float = 6.0

    def __call__(
        self, correct: Bool[Array, "*S"], speedup: Float[Array, "*S"], coverage: Float[Array, "*S"]
    ) -> Float[Array, "*S"]:
        """Rewards of turns. What incorrect turns hold for speedup and coverage is ignored, NaN included."""
        speed = jnp.minimum(speedup, self.speedup_cap)
        earned = self.w_correct + self.w_speed * speed + self.w_coverage * coverage
        return jnp.where(correct, earned, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MilestoneReward:
    """r = -1 failed, 1 correct, 2 faster than eager by `margin`, 3 faster than eager and torch.compile by it.

    Attributes:
        margin: a candidate is faster where the baseline takes more than 1 + margin times as long.

    Source: CUDA Agent (arXiv 2602.24286).
    """

    margin: float = 0.05

    def __call__(
        self, correct: Bool[Array, "*S"], speedup: Float[Array, "*S"], compile_speedup: Float[Array, "*S"]
    ) -> Float[Array, "*S"]:
        """Rewards of turns, from speedups against eager and against torch.compile; NaN (not measured) is no milestone."""
        eager = speedup > 1.0 + self.margin
        both = eager & (compile_speedup > 1.0 + self.margin)
        return jnp.where(correct, 1.0 + eager + both, -1.0)


def selection_rewards(
    turn_rewards: Float[Array, "S n U"],
    turn_mask: Bool[Array, "S n U"],
    malformed: Bool[Array, " S"],
    *,
    format_penalty: float,
    worst: float = 0.0,
) -> Float[Array, " S"]:
    """R[j] = mean over the scheme's n rollouts of max_t r[i,t]; worst - format_penalty where its call could not be read.

    Args:
        turn_rewards: policy turn rewards of S schemes, n rollouts each, U turns.
        turn_mask: turns that took place. A rollout without any counts as 0.
        malformed: schemes whose call could not be read, whatever their rollouts earned: a broken call is never worth as
            much as an honest empty one.
        format_penalty: size of the penalty, >= 0.
        worst: reward of a turn that failed.

    Source: daVinci-kernel (arXiv 2606.16497), as the paper states it (DESIGN 3.4).
    """
    best = jnp.max(jnp.where(turn_mask, turn_rewards, -jnp.inf), axis=-1)
    best = jnp.where(jnp.any(turn_mask, axis=-1), best, 0.0)
    return jnp.where(malformed, worst - format_penalty, jnp.mean(best, axis=-1))


def summary_trigger(
    speedup: Float[Array, "R U"],
    correct: Bool[Array, "R U"],
    turn_mask: Bool[Array, "R U"],
    *,
    alpha: float = 1.2,
    beta: float = 1.2,
) -> Bool[Array, " R"]:
    """Which rollouts have something to tell: best speedup >= alpha * the first turn's, and >= beta.

    An incorrect turn counts as speedup 0, so a rollout that repaired a wrong first turn need only reach
    `beta`.

    Source: daVinci-kernel (arXiv 2606.16497), alpha = beta = 1.2.
    """
    judged = jnp.where(correct & turn_mask, speedup, 0.0)
    best = jnp.max(judged, axis=-1)
    return (best >= alpha * judged[:, 0]) & (best >= beta)


def summary_rewards(
    effects: Float[Array, "M J"],
    accepted: Bool[Array, "M J"],
    malformed: Bool[Array, " M"],
    *,
    cap: float = 6.0,
    format_penalty: float,
) -> Float[Array, " M"]:
    """Reward of each summary: the verified effect of its best accepted skill, capped; 0 if none was accepted.

    Args:
        effects: verified speedup ratio (treated over control) of each of a summary's up to J skills.
        accepted: skills that verification accepted.
        cap: effects above this earn no more, as speedups in the policy's reward.
        malformed: summaries whose call could not be read: they get `-format_penalty`.

    Source: daVinci-kernel (arXiv 2606.16497), with the policy's cap (DESIGN 3.4).
    """
    best = jnp.max(jnp.where(accepted, jnp.minimum(effects, cap), 0.0), axis=-1)
    return jnp.where(malformed, -format_penalty, best)
