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
from dk_jax.train.credit import CreditConfig, Screened, assign, nothing_to_learn

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


def everything(coverage: float | None = None) -> StepRollouts:
    """A step in which all three agents have something to learn, and a task whose rollouts do not differ."""
    chosen = [choice("t", 0), choice("t", 1), choice("u", 0), choice("u", 1)]
    rollouts = [rollout("t", s, m, [1.0 + s, 2.0 + m], coverage) for s in range(3) for m in range(2)]
    rollouts += [rollout("u", s, m, [1.0], coverage) for s in range(3) for m in range(2)]
    calls = [told(0), told(1)]
    return StepRollouts(trajectories=[*chosen, *rollouts, *calls], proposals=[proposal(calls[0], 1.8), proposal(calls[1], 0.5)])


def dropped(metrics, *reasons: str) -> dict[str, float]:
    return {reason: metrics[f"dropped_{reason}"] for reason in reasons}


def test_every_trajectory_is_in_the_update_or_counted_with_its_reason():
    found = everything()
    rows, metrics = assign(found, config=dataclasses.replace(CONFIG, turns=2), seed=0, step=0)
    nothing = ("no_difference", "mismatch", "veto", "empty")
    lost = sum(metrics[f"dropped_{reason}_{agent}"] for reason in nothing for agent in AGENTS) + metrics["dropped_agent"]
    assert len(rows) + lost == len(found.trajectories) == 18
    assert dropped(metrics, "no_difference_policy", "no_difference_selection", "no_difference_summary") == {
        "no_difference_policy": 6.0, "no_difference_selection": 2.0, "no_difference_summary": 0.0,
    }  # fmt: skip
    assert dropped(metrics, "context", "null", "alone", "agent") == {"context": 6.0, "null": 2.0, "alone": 0.0, "agent": 0.0}
    rows, metrics = assign(everything(), config=dataclasses.replace(CONFIG, agents=("policy",)), seed=0, step=0)
    assert {row.agent for row in rows} == {AGENTS.index("policy")} and metrics["dropped_agent"] == 6.0


def test_a_rollout_that_earned_a_summary_and_got_none_is_counted():
    gained = [rollout("t", s, 0, [1.0, 2.0 + s]) for s in (0, 1)] + [rollout("u", s, 0, [1.0, 2.0 - s]) for s in (0, 1)]
    _, metrics = assign(step([*gained, told(0), told(1)]), config=CONFIG, seed=0, step=0)
    assert metrics["dropped_trigger"] == 1.0, "t was summarised, u was not"
    _, metrics = assign(step(gained), config=dataclasses.replace(CONFIG, agents=("policy",)), seed=0, step=0)
    assert metrics["dropped_trigger"] == 0.0, "nobody trains on summaries here"


def test_a_turn_that_nobody_else_reached_is_counted():
    rows, metrics = assign(step([rollout("t", 0, 0, [1.0, 2.0]), rollout("t", 1, 0, [3.0])]), config=CONFIG, seed=0, step=0)
    assert metrics["dropped_alone"] == 1.0 and len(rows) == 2


def test_turns_that_profiling_took_have_no_loss_and_a_rollout_without_others_is_empty():
    config = dataclasses.replace(CONFIG, profiling_low=0.3)
    lazy, own, wrong = rollout("t", 0, 0, [3.0], coverage=0.1), rollout("t", 1, 0, [2.0, 1.0], coverage=1.0), rollout("t", 2, 0, [0.0])
    half = rollout("t", 3, 0, [1.0, 2.0], coverage=1.0)
    half.turns[0].verdict = dataclasses.replace(half.turns[0].verdict, coverage=0.0)
    rows, metrics = assign(step([lazy, own, wrong, half]), config=config, seed=0, step=0)
    assert dropped(metrics, "profiling", "empty_policy") == {"profiling": 2.0, "empty_policy": 1.0} and len(rows) == 3
    assert rows[2].loss == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1], "the first turn's tokens are prompt to the second"


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_named_with_task_rollout_and_turn(broken):
    rollouts = [rollout("t", 0, 0, [1.0, 2.0]), rollout("t", 1, 1, [1.0, 3.0])]
    rollouts[1].rewards[1] = broken
    with pytest.raises(FloatingPointError, match=rf"reward of task 't', policy, scheme 1, rollout 1, turn 1, is {broken} at RL step 7"):
        assign(step(rollouts), config=CONFIG, seed=0, step=6)


def test_a_return_that_overflows_is_named():
    rollouts = [rollout("t", 0, 0, [1.0, 2.0]), rollout("t", 1, 0, [1.0, 3.0])]
    rollouts[0].rewards = [3e38, 3e38]
    with pytest.raises(FloatingPointError, match=r"return of task 't', policy, scheme 0, rollout 0, turn 0, is inf"):
        assign(step(rollouts), config=CONFIG, seed=0, step=0)


def test_an_effect_that_is_not_a_number_is_named():
    calls = [told(0), told(1)]
    bad = proposal(calls[1], 2.0)
    bad.decision = dataclasses.replace(bad.decision, effect=float("nan"))
    with pytest.raises(FloatingPointError, match=r"reward of task 't', summary, scheme -1, rollout 1"):
        assign(StepRollouts(trajectories=calls, proposals=[proposal(calls[0], 1.5), bad]), config=CONFIG, seed=0, step=0)


def test_a_step_with_nothing_to_learn_says_why():
    rows, metrics = assign(step([rollout("t", s, 0, [1.0, 1.0]) for s in range(3)]), config=CONFIG, seed=0, step=0)
    assert rows == [] and "3 are in groups whose rewards do not differ (rl.min_group_std)" in nothing_to_learn(metrics)
    assert "none has rewards" in nothing_to_learn(assign(step([]), config=CONFIG, seed=0, step=0)[1])


def rejecting(*members: int, vetoed: tuple[int, ...] = ()):
    """A screen that rejects policy rollouts of some schemes."""

    def screen(trajectories):
        gone = [t.agent == "policy" and t.scheme in members for t in trajectories]
        by_token = [g and t.scheme in vetoed for g, t in zip(gone, trajectories, strict=True)]
        return Screened(keep=[not g for g in gone], vetoed=by_token, metrics={"seen": 1.0})

    return screen


def test_what_the_screen_rejects_is_dropped_before_the_rest_is_weighed_but_stays_in_the_baselines():
    rollouts = [rollout("t", s, 0, [1.0 + s]) for s in range(4)]
    rows, metrics = assign(step(rollouts), config=CONFIG, seed=0, step=0, screen=rejecting(0, 3, vetoed=(3,)))
    assert [row.weight for row in rows] == pytest.approx([1 / (2 * 10.0)] * 2)
    assert rows[0].advantage[-1] == pytest.approx(1.5 - (1.0 + 2.0 + 2.5) / 3)
    assert dropped(metrics, "mismatch_policy", "veto_policy") == {"mismatch_policy": 1.0, "veto_policy": 1.0} and metrics["seen"] == 1.0
    rows, metrics = assign(step(rollouts), config=CONFIG, seed=0, step=0, screen=rejecting(0, 1, 2, 3))
    assert rows == [] and "4 have other probabilities under the trainer" in nothing_to_learn(metrics)


def test_by_a_constant_length_what_was_dropped_still_counts_and_by_tokens_long_answers_count_for_more():
    def weights(aggregate):
        rollouts = [rollout("t", s, 0, [1.0 + s] * (1 + s % 2)) for s in range(4)] + [rollout("u", s, 0, [1.0]) for s in range(4)]
        rows, _ = assign(step(rollouts), config=dataclasses.replace(CONFIG, aggregate=aggregate), seed=0, step=0)
        return [row.weight for row in rows]

    assert weights("sequence_sum") == pytest.approx([1 / (4 * 10.0)] * 4)
    assert weights("constant_length") == pytest.approx([1 / (8 * 10.0)] * 4)
    assert weights("token_mean") == pytest.approx([1 / (3 + 6 + 3 + 6)] * 4)


def test_all_turns_compares_a_turn_with_every_turn_of_its_task():
    a, b = rollout("t", 0, 0, [1.0, 2.0]), rollout("t", 1, 0, [1.0, 2.0])
    rows, metrics = assign(step([a, b]), config=dataclasses.replace(CONFIG, gamma=0.0, advantage="all_turns"), seed=0, step=0)
    assert a.advantages == b.advantages == pytest.approx([-1.0, 1.0]) and len(rows) == 2
    assert metrics["policy_groups_dropped"] == 0.0, "the rollouts are alike, their turns are not"
    same = [rollout("t", s, 0, [1.0, 1.0]) for s in (0, 1)]
    rows, metrics = assign(step(same), config=dataclasses.replace(CONFIG, gamma=0.0, advantage="all_turns"), seed=0, step=0)
    assert rows == [] and metrics["policy_groups_dropped"] == 1.0


def test_equal_skill_sets_drawn_twice_keep_rollouts_and_credit_of_their_own():
    chosen = [choice("t", 0, skills=("a",)), choice("t", 1, skills=("a",))]
    assign(step([*chosen, *(rollout("t", s, 0, [speed]) for s, speed in enumerate((3.0, 1.0, 2.0)))]), config=CONFIG, seed=0, step=0)
    assert [c.rewards for c in chosen] == [[pytest.approx(2.0)], [pytest.approx(1.0)]]
    assert chosen[0].advantages == pytest.approx([2.0 - (1.0 + 1.5) / 2]) and chosen[1].advantages == pytest.approx([1.0 - (2.0 + 1.5) / 2])


def test_under_milestones_a_broken_call_is_worth_less_than_failure():
    chosen = [choice("t", 0, error="not JSON"), choice("t", 1)]
    rollouts = [rollout("t", s, 0, [1.0]) for s in range(3)]
    for t in rollouts:
        t.rewards = [-1.0]
    assign(step([*chosen, *rollouts]), config=dataclasses.replace(CONFIG, worst=-1.0), seed=0, step=0)
    assert chosen[0].rewards == pytest.approx([-1.1]) and chosen[0].advantages[0] < 0 < chosen[1].advantages[0]
