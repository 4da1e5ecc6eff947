"""From judged episodes to the rows of one joint update: rewards, returns, advantages, filters (DESIGN 3.4).

The arrays' mathematics is in dk_jax.rl; this module only gathers trajectories into groups, by name, and spreads advantages back
over their tokens. What a step does not learn from is counted, by reason (AGENT is selection, policy or summary):

    metric                         counts
    dropped_no_difference_AGENT    trajectories of groups whose rewards, or returns, do not differ; *_groups_dropped is their groups' share
    dropped_mismatch_AGENT         trajectories whose tokens the trainer sees with other probabilities in the mean (dk_jax.train.mismatch)
    dropped_veto_AGENT             trajectories with one token that the trainer holds to be next to impossible
    dropped_empty_AGENT            trajectories without a token to learn from: none was sampled, or profiling took every turn
    dropped_agent                  trajectories of agents that are not trained (rl.agents)
    dropped_untried_summary        summaries whose skills were not tried (skills.max_verifications); in no baseline either
    dropped_null                   null schemes: nobody sampled them, they stand in the baseline of the selections alone
    dropped_trigger                tasks with a rollout that earned a summary and got none (skills.max_triggers, or no room in the context)
    dropped_profiling              correct policy turns that profiling rejection took (profiling_rejected: of all turns, their share)
    dropped_alone                  policy turns that no other rollout of the task reached: nothing to compare with, advantage 0
    dropped_context                policy turns that did not take place, the context being full

Every trajectory with rewards is in one of the first five, or in the update. Calls that can't be read (selection_malformed,
summary_malformed: shares) are not dropped: they get the format penalty. Tokens whose gradient clipping cuts off are the update's
`clip_fraction`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import numpy as np

from dk_jax.models.config import AGENTS
from dk_jax.rl.advantages import over_group_std, policy_advantages, selection_advantages, summary_advantages
from dk_jax.rl.filters import degenerate_groups, profiling_rejection
from dk_jax.rl.losses import sequence_weights
from dk_jax.rl.returns import discounted_returns
from dk_jax.rl.rewards import selection_rewards, summary_rewards
from dk_jax.rollout.episode import StepRollouts, triggers
from dk_jax.rollout.trajectory import Trajectory, derive_seed
from dk_jax.train.batch import Row

# Compiled whole: run op by op, each new number of trajectories would compile dozens of tiny programs.
_returns = jax.jit(discounted_returns, static_argnames="gamma")
_policy_advantages = jax.jit(policy_advantages, static_argnames=("estimator", "floor"))
_over_group_std = jax.jit(over_group_std, static_argnames="floor")
_selection_advantages = jax.jit(selection_advantages, static_argnames=("estimator", "floor"))
_summary_advantages = jax.jit(summary_advantages, static_argnames=("estimator", "floor"))
_degenerate = jax.jit(degenerate_groups, static_argnames="min_std")
_selection_rewards = jax.jit(selection_rewards, static_argnames=("format_penalty", "worst"))
_summary_rewards = jax.jit(summary_rewards, static_argnames=("cap", "format_penalty"))
_profiling = jax.jit(profiling_rejection, static_argnames=("threshold", "width"))
_weights = jax.jit(sequence_weights, static_argnames=("weights", "scale", "kind"))

_LEAST_STD = 1e-6


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
    advantage: str = "leave_one_out"  # of dk_jax.rl.advantages.ESTIMATORS
    aggregate: str = "sequence_sum"  # of dk_jax.rl.losses.AGGREGATES
    worst: float = 0.0  # reward of a turn that failed
    turns: int = 0  # of a rollout that the context does not cut short; 0 if not known
    alpha: float = 1.2  # summary trigger, to count what earned a summary and got none
    beta: float = 1.2

    @property
    def floor(self) -> float:
        """Least deviation that "all_turns" divides by."""
        return max(self.std_floor, _LEAST_STD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Screened:
    """A second look at the trajectories of an update, in their order: which to keep, and which of the others one token has vetoed."""

    keep: Sequence[bool]
    vetoed: Sequence[bool]
    metrics: dict[str, float]


Screen = Callable[[Sequence[Trajectory]], Screened]


def assign(
    rollouts: StepRollouts, *, config: CreditConfig, seed: int, step: int, screen: Screen | None = None
) -> tuple[list[Row], dict[str, float]]:
    """Fills in rewards and advantages of every trajectory and makes the update's rows.

    Args:
        rollouts: what one step collected; its trajectories are changed in place.
        seed, step: of the random numbers of profiling rejection, and of error messages.
        screen: asked about the trajectories that would make rows; see dk_jax.train.mismatch.

    Returns:
        Rows with a weight that makes their token losses add up to the joint loss, and metrics. Sequences of dropped groups,
        turns without advantage and the null scheme give no rows.

    Raises:
        FloatingPointError: a reward or a return that is not finite; names task, rollout and turn.
    """
    credit = _Credit(config=config, seed=seed, step=step)
    policy = [t for t in rollouts.of("policy") if t.rewards]
    credit.check([t for t in rollouts.trajectories if t.rewards], [t.rewards for t in rollouts.trajectories if t.rewards], "reward")
    found = credit.policy(policy)
    found += credit.selection(rollouts.of("selection"), policy)
    found += credit.summary(rollouts)
    credit.count_untaken(policy, rollouts.of("summary"))
    rows = credit.rows(found, screen)
    return rows, credit.all_metrics()


def nothing_to_learn(metrics: dict[str, float]) -> str:
    """Why `assign` made no rows, from its metrics: one line for the log."""
    reasons = {
        "no_difference": "are in groups whose rewards do not differ (rl.min_group_std)",
        "mismatch": "have other probabilities under the trainer than under the sampler (rl.mismatch_low, rl.mismatch_high)",
        "veto": "hold a token that the trainer holds to be next to impossible (rl.mismatch_veto)",
        "empty": "have no token to learn from",
    }
    said = []
    for reason, text in reasons.items():
        if number := int(sum(metrics[f"dropped_{reason}_{agent}"] for agent in AGENTS)):
            said.append(f"{number} {text}")
    if number := int(metrics["dropped_agent"]):
        said.append(f"{number} are of agents that are not trained (rl.agents)")
    return f"nothing to learn, the parameters stay as they are: of the trajectories {'; '.join(said) or 'none has rewards'}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kept:
    """A trajectory with credit: whether its group differs, and its turns that profiling rejection took."""

    trajectory: Trajectory
    differs: bool
    rejected: frozenset[int] = frozenset()

    def is_target(self, turn: int) -> bool:
        return turn >= 0 and turn not in self.rejected


@dataclasses.dataclass(kw_only=True)
class _Credit:
    """The credit of one step; each method sees to one agent's and returns all of the agent's trajectories that have one."""

    config: CreditConfig
    seed: int
    step: int
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    dropped: Counter = dataclasses.field(default_factory=Counter)

    def check(self, trajectories: Sequence[Trajectory], values: Sequence[Sequence[float]], what: str) -> None:
        """Raises FloatingPointError for the first value of a trajectory's turns that is not finite."""
        for t, row in zip(trajectories, values, strict=True):
            for turn in range(len(t.rewards)):
                if not np.isfinite(row[turn]):
                    raise FloatingPointError(
                        f"the {what} of task {t.task!r}, {t.agent}, scheme {t.scheme}, rollout {t.member}, turn {turn}, is {row[turn]} at RL "
                        f"step {self.step + 1}. See how the judge came by it; verdicts that have arrived are in journal_rl.jsonl, and one "
                        "that is removed there is asked for again"
                    )

    def policy(self, policy: list[Trajectory]) -> list[_Kept]:
        if not policy:
            return []
        c = self.config
        rewards, mask = _padded([t.rewards for t in policy])
        groups = _ids([t.group for t in policy])
        returns = np.asarray(_returns(rewards, mask, gamma=c.gamma))
        self.check(policy, returns, "return")
        advantages = np.array(_policy_advantages(returns, mask, groups, estimator=c.advantage, floor=c.floor))
        if c.std_floor > 0 and c.advantage != "all_turns":
            advantages = np.array(_over_group_std(advantages, returns, mask, groups, floor=c.std_floor))
        if c.advantage == "all_turns":  # turns are compared with turns of other indices: members of one group all
            found = _degenerate(returns.reshape(-1), np.repeat(groups, mask.shape[1]), mask.reshape(-1), min_std=c.min_group_std)
            keep = np.asarray(found.keep).reshape(mask.shape).any(axis=1)
        else:
            found = _degenerate(returns, groups, mask, min_std=c.min_group_std)
            keep = np.asarray(found.keep)
            reached = (groups[:, None] == groups[None, :]).astype(np.int32) @ mask.astype(np.int32)
            self.dropped["alone"] = int((mask & (reached == 1)).sum())
        self.metrics["policy_groups_dropped"] = float(found.dropped) / max(float(found.groups), 1.0)
        rejected = [frozenset()] * len(policy)
        if c.profiling_low > 0:
            stays = self._profiled(policy, mask)
            advantages = np.where(stays, advantages, 0.0)
            rejected = [frozenset(np.flatnonzero(~row).tolist()) for row in stays]
        for i, t in enumerate(policy):
            t.advantages = [float(a) for a in advantages[i, : len(t.rewards)]]
        return [_Kept(trajectory=t, differs=bool(k), rejected=r) for t, k, r in zip(policy, keep, rejected, strict=True)]

    def _profiled(self, policy: list[Trajectory], mask: np.ndarray) -> np.ndarray:
        """Which turns stay: bool, as `mask`."""
        coverage, _ = _padded([[v.coverage if v.coverage is not None else 0.0 for v in t.verdicts] for t in policy])
        correct, _ = _padded([[float(v.correct) for v in t.verdicts] for t in policy])
        rng = np.random.default_rng(derive_seed(self.seed, "profiling", self.step))
        stays = np.asarray(
            _profiling(
                coverage,
                correct > 0,
                rng.random(coverage.shape, np.float32),
                threshold=self.config.profiling_low,
                width=self.config.profiling_width,
            )
        )
        self.dropped["profiling"] = int((~stays & mask).sum())
        self.metrics["profiling_rejected"] = self.dropped["profiling"] / max(float(mask.sum()), 1.0)
        return stays

    def selection(self, selections: list[Trajectory], policy: list[Trajectory]) -> list[_Kept]:
        if not selections:
            return []
        c = self.config
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
        rewards = np.asarray(_selection_rewards(values, mask, malformed, format_penalty=c.format_penalty, worst=c.worst))
        groups = _ids([key[0] for key in keys])
        advantages = np.asarray(_selection_advantages(rewards, groups, is_null, estimator=c.advantage, floor=c.floor))
        found = _degenerate(rewards, groups, min_std=c.min_group_std)
        keep = np.asarray(found.keep)
        self.metrics["selection_groups_dropped"] = float(found.dropped) / max(float(found.groups), 1.0)
        out = []
        for s, key in enumerate(keys):
            if key not in sampled:
                continue
            trajectory = sampled[key]
            trajectory.rewards, trajectory.advantages = [float(rewards[s])], [float(advantages[s])]
            out.append(_Kept(trajectory=trajectory, differs=bool(keep[s])))
        self.check([k.trajectory for k in out], [k.trajectory.rewards for k in out], "reward")
        self.dropped["null"] = int(is_null.sum())
        self.metrics["selection_reward"] = float(rewards[~is_null].mean())
        self.metrics["selection_null_reward"] = float(rewards[is_null].mean()) if is_null.any() else 0.0
        self.metrics["selection_malformed"] = float(malformed[~is_null].mean())
        self.metrics["selection_skills"] = float(np.mean([len(t.skills) for t in selections]))
        return out

    def summary(self, rollouts: StepRollouts) -> list[_Kept]:
        c = self.config
        calls, proposed = rollouts.of("summary"), len(rollouts.of("summary"))
        # Read back from a file, verification is over, and its verdict is the reward that was written down.
        read_back = any(call.rewards for call in calls)
        if read_back:
            calls = [call for call in calls if call.rewards]
        else:
            calls = [call for call in calls if not _is_unknown(call, rollouts)]
        if proposed:
            self.dropped["untried_summary"] = proposed - len(calls)
            self.metrics["summary_untried"] = 1.0 - len(calls) / proposed
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
        rewards = np.asarray(_summary_rewards(effects, accepted, malformed, cap=c.summary_cap, format_penalty=c.format_penalty))
        if read_back:
            rewards = np.array([call.rewards[0] for call in calls], np.float32)
        groups = _ids([call.group for call in calls])
        advantages = np.asarray(_summary_advantages(rewards, groups, estimator=c.advantage, floor=c.floor))
        found = _degenerate(rewards, groups, min_std=c.min_group_std)
        for i, call in enumerate(calls):
            call.rewards, call.advantages = [float(rewards[i])], [float(advantages[i])]
        self.check(calls, [call.rewards for call in calls], "reward")
        self.metrics["summary_groups_dropped"] = float(found.dropped) / max(float(found.groups), 1.0)
        self.metrics["summary_reward"] = float(rewards.mean())
        self.metrics["summary_malformed"] = float(malformed.mean())
        return [_Kept(trajectory=call, differs=bool(keep)) for call, keep in zip(calls, np.asarray(found.keep), strict=True)]

    def count_untaken(self, policy: list[Trajectory], summaries: list[Trajectory]) -> None:
        """Counts what a full context, or a limit, kept from being sampled at all."""
        c, timed = self.config, [t for t in policy if t.timed]
        self.dropped["context"] = sum(max(c.turns - len(t.rewards), 0) for t in timed)
        earned = triggers(timed, alpha=c.alpha, beta=c.beta, limit=len(timed)) if "summary" in c.agents else []
        self.dropped["trigger"] = len({t.task for t in earned} - {t.task for t in summaries})

    def rows(self, found: list[_Kept], screen: Screen | None) -> list[Row]:
        """Rows of what is learnt from; counts the rest."""
        trained = [k for k in found if k.trajectory.agent in self.config.agents]
        self.dropped["agent"] = len(found) - len(trained)
        kept = []
        for k in trained:
            if not k.differs:
                self.dropped[f"no_difference_{k.trajectory.agent}"] += 1
            elif not any(k.is_target(turn) for turn in k.trajectory.turn_index):
                self.dropped[f"empty_{k.trajectory.agent}"] += 1
            else:
                kept.append(k)
        if screen is not None and kept:
            seen = screen([k.trajectory for k in kept])
            self.metrics |= seen.metrics
            for k, stays, vetoed in zip(kept, seen.keep, seen.vetoed, strict=True):
                if not stays:
                    self.dropped[f"{'veto' if vetoed else 'mismatch'}_{k.trajectory.agent}"] += 1
            kept = [k for k, stays in zip(kept, seen.keep, strict=True) if stays]
        chosen = {id(k) for k in kept}
        sequences = [(k, where) for k in trained for where in k.trajectory.sequences]
        tokens = np.array([sum(k.is_target(turn) for turn in k.trajectory.turn_index[where]) for k, where in sequences], np.int32)
        counted = np.array([id(k) in chosen for k, _ in sequences], bool) & (tokens > 0)
        if not counted.any():
            return []
        c = self.config
        weights = np.asarray(
            _weights(
                np.array([AGENTS.index(k.trajectory.agent) for k, _ in sequences], np.int32),
                counted,
                weights=tuple(c.weights),
                scale=c.loss_scale,
                kind=c.aggregate,
                tokens=tokens,
                sampled=np.ones(len(sequences), bool),
            )
        )
        return [_row(k, where, float(w)) for (k, where), w, is_in in zip(sequences, weights, counted, strict=True) if is_in]

    def all_metrics(self) -> dict[str, float]:
        """Metrics, with a number for every reason of the module's table."""
        reasons = ("agent", "untried_summary", "null", "trigger", "profiling", "alone", "context")
        reasons += tuple(f"{reason}_{agent}" for reason in ("no_difference", "mismatch", "veto", "empty") for agent in AGENTS)
        return self.metrics | {f"dropped_{reason}": float(self.dropped[reason]) for reason in reasons}


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


def _is_unknown(call: Trajectory, rollouts: StepRollouts) -> bool:
    """Whether a summary's worth was not found out: some of its skills were not tried in this step, and none that was is
    accepted. It gets no credit and stands in no baseline."""
    own = [p for p in rollouts.proposals if p.call is call]
    tried = [p for p in own if p.verdict is not None]
    return any(p.untried for p in own) and not any(p.verdict.status == "accept" for p in tried)


def _row(kept: _Kept, where: slice, weight: float) -> Row:
    """The row of one of a trajectory's sequences."""
    trajectory = kept.trajectory
    turn_of = trajectory.turn_index[where]
    return Row(
        tokens=trajectory.tokens[where],
        loss=[float(kept.is_target(t)) for t in turn_of],
        advantage=[trajectory.advantages[t] if t >= 0 else 0.0 for t in turn_of],
        old_logp=trajectory.logp_sample[where],
        agent=AGENTS.index(trajectory.agent),
        weight=weight,
    )
