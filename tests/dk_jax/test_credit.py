"""Credit: who is compared with whom, and what each token of a joint update weighs."""

from __future__ import annotations

import dataclasses

import pytest

from dk_jax.models.config import AGENTS
from dk_jax.rollout.episode import StepRollouts, triggers
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict
from dk_jax.rollout.verify import Proposal
from dk_jax.skills.record import SkillDraft
from dk_jax.skills.verification import Decision
from dk_jax.train.credit import CreditConfig, assign

CONFIG = CreditConfig(
    gamma=1.0, min_group_std=1e-3, format_penalty=0.1, summary_cap=6.0, weights=(0.3, 1.0, 0.5), loss_scale=10.0
)


def verdict(speedup: float, coverage: float | None = None) -> Verdict:
    ok = speedup > 0
    return Verdict(
        outcome="ok" if ok else "incorrect", stage="timed" if ok else "built", reward=0.5 + 0.5 * speedup if ok else 0.0,
        speedup=speedup, noisy=False, coverage=coverage, feedback="",
    )  # fmt: skip


def rollout(task: str, scheme: int, member: int, speedups: list[float], coverage: float | None = None) -> Trajectory:
    t = Trajectory(agent="policy", task=task, group=task, scheme=scheme, member=member)
    for s in speedups:
        t.append_prompt([1, 2])
        t.append_sample([3, 4, 5], [-0.1, -0.2, -0.3])
        v = verdict(s, coverage)
        t.turns.append(Turn(text="", stop="eos", source="k", verdict=v, reward=v.reward))
        t.rewards.append(v.reward)
    return t


def choice(task: str, scheme: int, error: str = "", skills: tuple[str, ...] = ("a",)) -> Trajectory:
    t = Trajectory(agent="selection", task=task, group=task, scheme=scheme, skills=() if error else skills)
    t.append_prompt([1])
    t.append_sample([2, 3], [-0.5, -0.5])
    t.turns.append(Turn(text="", stop="eos", error=error))
    return t


def step(trajectories) -> StepRollouts:
    return StepRollouts(trajectories=trajectories, proposals=[])


def test_with_a_floor_a_task_of_large_rewards_moves_the_policy_as_others_do():
    fast = [rollout("t", 0, i, [speedup]) for i, speedup in enumerate((1.0, 5.0))]
    checked = [rollout("u", 0, i, [speedup]) for i, speedup in enumerate((0.0, 1.0))]
    assign(step([*fast, *checked]), config=dataclasses.replace(CONFIG, std_floor=0.25), seed=0, step=0)
    assert [t.advantages[0] for t in (*fast, *checked)] == pytest.approx([-2.0, 2.0, -2.0, 2.0])


def test_a_policy_turn_is_compared_with_the_same_turn_of_the_other_rollouts_of_its_task():
    a, b = rollout("t", 0, 0, [1.0, 2.0]), rollout("t", 1, 0, [0.0, 4.0])
    other = [rollout("u", 0, 0, [6.0, 6.0]), rollout("u", 1, 0, [1.0, 1.0])]
    assign(step([a, b, *other]), config=CONFIG, seed=0, step=0)
    # returns: a = (1.0 + 1.5, 1.5), b = (0 + 2.5, 2.5)
    assert a.advantages == pytest.approx([2.5 - 2.5, 1.5 - 2.5])
    assert b.advantages == pytest.approx([0.0, 1.0])
    assert other[0].advantages[1] == pytest.approx(3.5 - 1.0)


def test_tokens_carry_the_advantage_of_the_turn_that_sampled_them_and_prompts_carry_none():
    a, b = rollout("t", 0, 0, [1.0, 2.0]), rollout("t", 1, 0, [0.0, 4.0])
    rows, _ = assign(step([a, b]), config=CONFIG, seed=0, step=0)
    assert rows[0].loss == [0, 0, 1, 1, 1, 0, 0, 1, 1, 1]
    assert rows[0].advantage == pytest.approx([0] * 5 + [0, 0, -1, -1, -1])
    assert rows[0].old_logp[2:5] == [-0.1, -0.2, -0.3]
    assert rows[0].agent == AGENTS.index("policy")


def test_weights_make_the_joint_loss_a_weighted_mean_over_each_agents_sequences():
    rollouts = [rollout("t", s, 0, [1.0 + s]) for s in range(3)]
    rows, _ = assign(step([choice("t", 0), choice("t", 1), *rollouts]), config=CONFIG, seed=0, step=0)
    by_agent = {agent: [r.weight for r in rows if r.agent == i] for i, agent in enumerate(AGENTS)}
    assert by_agent["policy"] == pytest.approx([1.0 / (3 * 10.0)] * 3)
    assert by_agent["selection"] == pytest.approx([0.3 / (2 * 10.0)] * 2)
    assert by_agent["summary"] == []


def test_selection_is_rewarded_by_its_schemes_best_turns_against_the_other_schemes_and_the_null_scheme():
    chosen = [choice("t", 0), choice("t", 1)]
    rollouts = [rollout("t", 0, 0, [1.0, 3.0]), rollout("t", 1, 0, [2.0, 1.0]), rollout("t", 2, 0, [0.0, 1.0])]
    assign(step([*chosen, *rollouts]), config=CONFIG, seed=0, step=0)
    # scheme rewards 2.0, 1.5, null 1.0
    assert chosen[0].rewards == pytest.approx([2.0]) and chosen[0].advantages == pytest.approx([2.0 - 1.25])
    assert chosen[1].advantages == pytest.approx([1.5 - 1.5])


def test_a_malformed_selection_gets_the_format_penalty_whatever_its_rollouts_earned():
    chosen = [choice("t", 0, error="not JSON"), choice("t", 1)]
    rollouts = [rollout("t", s, 0, [6.0]) for s in range(3)]
    _, metrics = assign(step([*chosen, *rollouts]), config=CONFIG, seed=0, step=0)
    assert chosen[0].rewards == pytest.approx([-0.1]) and chosen[0].advantages[0] < 0
    assert metrics["selection_malformed"] == 0.5


def test_groups_whose_returns_do_not_differ_are_dropped_and_counted():
    same = [rollout("t", s, 0, [1.0, 1.0]) for s in range(3)]
    rows, metrics = assign(step([*same, rollout("u", 0, 0, [1.0]), rollout("u", 1, 0, [2.0])]), config=CONFIG, seed=0, step=0)
    assert len(rows) == 2 and metrics["policy_groups_dropped"] == 0.5


def test_a_rollout_that_ran_out_of_room_is_left_out_of_later_baselines():
    a, b, c = rollout("t", 0, 0, [1.0, 1.0]), rollout("t", 1, 0, [3.0]), rollout("t", 2, 0, [1.0, 5.0])
    assign(step([a, b, c]), config=CONFIG, seed=0, step=0)
    assert a.advantages[1] == pytest.approx(1.0 - 3.0)
    assert len(b.advantages) == 1


def test_lazy_kernels_lose_their_turn_to_profiling_rejection_but_wrong_ones_stay():
    config = CreditConfig(
        gamma=1.0, min_group_std=1e-3, format_penalty=0.1, summary_cap=6.0, weights=(0.3, 1.0, 0.5), loss_scale=1.0,
        profiling_low=0.3,
    )  # fmt: skip
    lazy, own, wrong = rollout("t", 0, 0, [3.0], coverage=0.1), rollout("t", 1, 0, [2.0], coverage=1.0), rollout("t", 2, 0, [0.0])
    _, metrics = assign(step([lazy, own, wrong]), config=config, seed=0, step=0)
    assert lazy.advantages == [0.0] and own.advantages[0] != 0 and wrong.advantages[0] < 0
    assert metrics["profiling_rejected"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("speedups", "earned"),
    [([1.0, 1.3], True), ([1.0, 1.1], False), ([0.5, 1.1], False), ([0.0, 1.3], True), ([2.0, 1.0], False), ([2.0, 0.0], False)],
)
def test_a_summary_is_earned_by_improving_on_the_first_turn_and_on_eager(speedups, earned):
    found = triggers([rollout("t", 0, 0, speedups)], alpha=1.2, beta=1.2, limit=5)
    assert bool(found) is earned


def test_triggers_take_the_largest_gain_of_each_task_and_no_more_than_the_limit():
    rollouts = [rollout("t", 0, 0, [1.0, 2.0]), rollout("t", 0, 1, [1.0, 4.0]), rollout("u", 0, 0, [1.0, 3.0])]
    assert triggers(rollouts, alpha=1.2, beta=1.2, limit=5) == [rollouts[1], rollouts[2]]
    assert triggers(rollouts, alpha=1.2, beta=1.2, limit=1) == [rollouts[1]]


def test_nothing_to_compare_gives_no_rows():
    rows, _ = assign(step([rollout("t", 0, 0, [1.0])]), config=CONFIG, seed=0, step=0)
    assert rows == []


def told(member: int, rewards=()) -> Trajectory:
    t = Trajectory(agent="summary", task="t", group="t/scheme0/rollout0", member=member, rewards=list(rewards))
    t.append_prompt([1])
    t.append_sample([2, 3], [-0.5, -0.5])
    t.turns.append(Turn(text="", stop="eos"))
    return t


def proposal(call: Trajectory, effect: float | None = None, **fields) -> Proposal:
    decision = None
    if effect is not None:
        decision = Decision(status="accept" if effect > 1 else "reject", effect=effect, low=None, high=None, p=0.01, n=4, best=effect, reason="")
    draft = SkillDraft(name="a", description="", scope="general", tags=(), content="")
    return Proposal(call=call, trigger=call, draft=draft, decision=decision, **fields)


def test_summaries_earn_the_effect_of_their_best_accepted_skill_against_each_other():
    calls = [told(0), told(1), told(2)]
    proposals = [proposal(calls[0], 1.8), proposal(calls[0], 9.0), proposal(calls[1], 0.7)]
    rows, metrics = assign(StepRollouts(trajectories=calls, proposals=proposals), config=CONFIG, seed=0, step=0)
    assert [c.rewards for c in calls] == [[6.0], [0.0], [0.0]]
    assert [c.advantages for c in calls] == [pytest.approx([6.0]), pytest.approx([-3.0]), pytest.approx([-3.0])]
    assert len(rows) == 3 and metrics["summary_untried"] == 0.0


def test_equal_proposals_of_a_step_get_equal_credit():
    calls = [told(0), told(1)]
    first = proposal(calls[0], 1.8)
    again = proposal(calls[1], twin=first, problems=["says the same"])
    assert not again.accepted, "one of them entered the library"
    rows, _ = assign(StepRollouts(trajectories=calls, proposals=[first, again]), config=CONFIG, seed=0, step=0)
    assert [c.rewards for c in calls] == [[pytest.approx(1.8)]] * 2
    assert rows == []


def test_what_was_not_tried_is_no_failure_and_stands_in_no_baseline():
    calls = [told(0), told(1), told(2)]
    crowded = proposal(calls[1], untried=True, problems=["no room"])
    proposals = [proposal(calls[0], 2.0), crowded, proposal(calls[2], 0.5), proposal(calls[2], untried=True)]
    rows, metrics = assign(StepRollouts(trajectories=calls[:2], proposals=proposals[:2]), config=CONFIG, seed=0, step=0)
    assert rows == [] and metrics["summary_untried"] == 0.5 and calls[1].rewards == []
    calls[0].rewards = []
    nothing = told(3)  # a readable call that proposes nothing is worth nothing, and is known to be
    rows, metrics = assign(StepRollouts(trajectories=[*calls, nothing], proposals=proposals), config=CONFIG, seed=0, step=0)
    assert (calls[0].advantages, nothing.advantages) == ([pytest.approx(2.0)], [pytest.approx(-2.0)])
    assert calls[1].advantages == calls[2].advantages == [] and len(rows) == 2 and metrics["summary_untried"] == 0.5
    # Written to a file and read back, the same calls count.
    again = [told(0, [2.0]), told(1), told(2), told(3, [0.0])]
    rows, _ = assign(StepRollouts(trajectories=again, proposals=[]), config=CONFIG, seed=0, step=0)
    assert len(rows) == 2 and again[0].advantages == [pytest.approx(2.0)]
