"""From judged episodes to the rows of one joint update: rewards, returns, advantages, filters (DESIGN 3.4).

The arrays' mathematics is in dk_jax.rl; this module only gathers trajectories into groups, by name, and spreads advantages back
over their tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from dk_jax.models.config import AGENTS
from dk_jax.rl.advantages import over_group_std, policy_advantages, selection_advantages, summary_advantages
from dk_jax.rl.filters import degenerate_groups, profiling_rejection
from dk_jax.rl.losses import sequence_weights
from dk_jax.rl.returns import discounted_returns
from dk_jax.rl.rewards import selection_rewards, summary_rewards
from dk_jax.rollout.episode import StepRollouts
from dk_jax.rollout.trajectory import Trajectory, derive_seed
from dk_jax.train.batch import Row

# Compiled whole: run op by op, each new number of trajectories would compile dozens of tiny programs.
_returns = jax.jit(discounted_returns, static_argnames="gamma")
_policy_advantages = jax.jit(policy_advantages)
_over_group_std = jax.jit(over_group_std, static_argnames="floor")
_selection_advantages = jax.jit(selection_advantages)
_summary_advantages = jax.jit(summary_advantages)
_degenerate = jax.jit(degenerate_groups, static_argnames="min_std")
_selection_rewards = jax.jit(selection_rewards, static_argnames="format_penalty")
_summary_rewards = jax.jit(summary_rewards, static_argnames=("cap", "format_penalty"))
_profiling = jax.jit(profiling_rejection, static_argnames=("threshold", "width"))
_weights = jax.jit(sequence_weights, static_argnames=("weights", "scale"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CreditConfig:
    """Numbers of the advantages and of the joint loss's weights; names as in DESIGN 3.4."""

    gamma: float
    min_group_std: float
    format_penalty: float
    summary_cap: float
    weights: tuple[float, float, float]  # in the order of AGENTS
    loss_scale: float
    profiling_low: float = 0.0
    profiling_width: float = 0.1
    std_floor: float = 0.0  # above 0: policy advantages over their group's deviation, or over this if that is less
    agents: tuple[str, ...] = AGENTS  # whose sequences are in the update; the others get credit alone


def assign(rollouts: StepRollouts, *, config: CreditConfig, seed: int, step: int) -> tuple[list[Row], dict[str, float]]:
    """Fills in rewards and advantages of every trajectory and makes the update's rows.

    Args:
        rollouts: what one step collected; its trajectories are changed in place.
        seed, step: of the random numbers of profiling rejection.

    Returns:
        Rows with a weight that makes their token losses add up to the joint loss, and metrics. Sequences of dropped groups,
        turns without advantage and the null scheme give no rows.
    """
    policy = [t for t in rollouts.of("policy") if t.rewards]
    metrics: dict[str, float] = {}
    kept = _policy(policy, config, metrics, seed=seed, step=step)
    kept += _selection(rollouts.of("selection"), policy, config, metrics)
    kept += _summary(rollouts, config, metrics)
    sequences = [(t, where) for t in kept if t.agent in config.agents for where in t.sequences]
    agents = np.array([AGENTS.index(t.agent) for t, _ in sequences], np.int32)
    if not sequences:
        return [], metrics
    weights = np.asarray(
        _weights(agents, np.ones(len(sequences), bool), weights=tuple(config.weights), scale=config.loss_scale)
    )
    return [_row(t, where, float(w)) for (t, where), w in zip(sequences, weights, strict=True)], metrics


def _padded(rows: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    width = max(len(row) for row in rows)
    values = np.zeros((len(rows), width), np.float32)
    mask = np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        values[i, : len(row)] = row
        mask[i, : len(row)] = True
    return values, mask


def _ids(names: Sequence[str]) -> np.ndarray:
    index = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return np.array([index[name] for name in names], np.int32)


def _policy(policy: list[Trajectory], config: CreditConfig, metrics: dict[str, float], *, seed: int, step: int) -> list[Trajectory]:
    if not policy:
        return []
    rewards, mask = _padded([t.rewards for t in policy])
    groups = _ids([t.group for t in policy])
    returns = np.asarray(_returns(rewards, mask, gamma=config.gamma))
    advantages = np.array(_policy_advantages(returns, mask, groups))
    if config.std_floor > 0:
        advantages = np.array(_over_group_std(advantages, returns, mask, groups, floor=config.std_floor))
    found = _degenerate(returns, groups, mask, min_std=config.min_group_std)
    keep = np.asarray(found.keep)
    metrics["policy_groups_dropped"] = float(found.dropped) / max(float(found.groups), 1.0)
    if config.profiling_low > 0:
        coverage, _ = _padded([[v.coverage if v.coverage is not None else 0.0 for v in t.verdicts] for t in policy])
        correct, _ = _padded([[float(v.correct) for v in t.verdicts] for t in policy])
        rng = np.random.default_rng(derive_seed(seed, "profiling", step))
        stays = np.asarray(
            _profiling(
                coverage,
                correct > 0,
                rng.random(coverage.shape, np.float32),
                threshold=config.profiling_low,
                width=config.profiling_width,
            )
        )
        metrics["profiling_rejected"] = float((~stays & mask).sum()) / max(float(mask.sum()), 1.0)
        advantages = np.where(stays, advantages, 0.0)
    for i, t in enumerate(policy):
        t.advantages = [float(a) for a in advantages[i, : len(t.rewards)]]
    return [t for t, k in zip(policy, keep, strict=True) if k]


def _selection(
    selections: list[Trajectory], policy: list[Trajectory], config: CreditConfig, metrics: dict[str, float]
) -> list[Trajectory]:
    if not selections:
        return []
    by_scheme: dict[tuple[str, int], list[list[float]]] = {}
    for t in policy:
        by_scheme.setdefault((t.task, t.scheme), []).append(t.rewards)
    sampled = {(t.task, t.scheme): t for t in selections}
    keys = [key for key in by_scheme if key[0] in {t.task for t in selections}]
    n = max(len(by_scheme[key]) for key in keys)
    turns = max(len(row) for key in keys for row in by_scheme[key])
    values = np.zeros((len(keys), n, turns), np.float32)
    mask = np.zeros((len(keys), n, turns), bool)
    for s, key in enumerate(keys):
        for i, row in enumerate(by_scheme[key]):
            values[s, i, : len(row)] = row
            mask[s, i, : len(row)] = True
    malformed = np.array([key in sampled and bool(sampled[key].turns[-1].error) for key in keys])
    is_null = np.array([key not in sampled for key in keys])
    rewards = np.asarray(_selection_rewards(values, mask, malformed, format_penalty=config.format_penalty))
    groups = _ids([key[0] for key in keys])
    advantages = np.asarray(_selection_advantages(rewards, groups, is_null))
    found = _degenerate(rewards, groups, min_std=config.min_group_std)
    metrics["selection_groups_dropped"] = float(found.dropped) / max(float(found.groups), 1.0)
    kept = []
    for s, key in enumerate(keys):
        if key not in sampled:
            continue
        trajectory = sampled[key]
        trajectory.rewards, trajectory.advantages = [float(rewards[s])], [float(advantages[s])]
        if bool(found.keep[s]):
            kept.append(trajectory)
    metrics["selection_reward"] = float(rewards[~is_null].mean())
    metrics["selection_null_reward"] = float(rewards[is_null].mean()) if is_null.any() else 0.0
    metrics["selection_malformed"] = float(malformed[~is_null].mean())
    metrics["selection_skills"] = float(np.mean([len(t.skills) for t in selections]))
    return kept


def _summary(rollouts: StepRollouts, config: CreditConfig, metrics: dict[str, float]) -> list[Trajectory]:
    calls, proposed = rollouts.of("summary"), len(rollouts.of("summary"))
    # Read back from a file, verification is over, and its verdict is the reward that was written down.
    read_back = any(call.rewards for call in calls)
    if read_back:
        calls = [call for call in calls if call.rewards]
    else:
        calls = [call for call in calls if not _is_unknown(call, rollouts)]
    if proposed:
        metrics["summary_untried"] = 1.0 - len(calls) / proposed
    if not calls:
        return []
    per_call = [[p for p in rollouts.proposals if p.call is call] for call in calls]
    width = max(1, max(len(found) for found in per_call))
    effects = np.ones((len(calls), width), np.float32)
    accepted = np.zeros((len(calls), width), bool)
    for i, found in enumerate(per_call):
        for j, proposal in enumerate(found):
            effects[i, j] = proposal.effect
            accepted[i, j] = proposal.verdict is not None and proposal.verdict.status == "accept"
    malformed = np.array([bool(call.turns[-1].error) for call in calls])
    rewards = np.asarray(
        _summary_rewards(effects, accepted, malformed, cap=config.summary_cap, format_penalty=config.format_penalty)
    )
    if read_back:
        rewards = np.array([call.rewards[0] for call in calls], np.float32)
    groups = _ids([call.group for call in calls])
    advantages = np.asarray(_summary_advantages(rewards, groups))
    found = _degenerate(rewards, groups, min_std=config.min_group_std)
    for i, call in enumerate(calls):
        call.rewards, call.advantages = [float(rewards[i])], [float(advantages[i])]
    metrics["summary_reward"] = float(rewards.mean())
    metrics["summary_malformed"] = float(malformed.mean())
    return [call for call, keep in zip(calls, np.asarray(found.keep), strict=True) if keep]


def _is_unknown(call: Trajectory, rollouts: StepRollouts) -> bool:
    """Whether a summary's worth was not found out: some of its skills were not tried in this step, and none that was is
    accepted. It gets no credit and stands in no baseline."""
    own = [p for p in rollouts.proposals if p.call is call]
    tried = [p for p in own if p.verdict is not None]
    return any(p.untried for p in own) and not any(p.verdict.status == "accept" for p in tried)


def _row(trajectory: Trajectory, where: slice, weight: float) -> Row:
    """The row of one of a trajectory's sequences."""
    turn_of = trajectory.turn_index[where]
    advantage = [trajectory.advantages[t] if t >= 0 else 0.0 for t in turn_of]
    return Row(
        tokens=trajectory.tokens[where],
        loss=[float(t >= 0) for t in turn_of],
        advantage=advantage,
        old_logp=trajectory.logp_sample[where],
        agent=AGENTS.index(trajectory.agent),
        weight=weight,
    )
