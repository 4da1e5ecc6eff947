"""Held-out scores count every sample, failures included; the protocol: a greedy scheme, T judged turns."""

import json

import pytest

from dk_jax.evaluation.heldout import all_scores, evaluate, save_scores, score
from dk_jax.evaluation.table import final_table
from dk_jax.rollout.episode import RolloutConfig
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict
from dk_jax.skills.record import Skill
from dk_jax.tasks.builtin import builtin_suite

CONFIG = RolloutConfig(
    selections=2, rollouts=2, turns=2, summaries=2, style="compact", language="cpp", form="kernel",
    max_policy_tokens=50, max_selection_tokens=20, max_summary_tokens=20, max_context_tokens=1000,
    max_skills=1,
)  # fmt: skip
TASKS = builtin_suite("cpu").held_out[:3]


def verdict(outcome: str = "ok", speedup: float = 0.0, stage: str = "timed") -> Verdict:
    return Verdict(
        outcome=outcome,
        stage=stage,
        reward=speedup,
        speedup=speedup,
        noisy=False,
        coverage=None,
        feedback=outcome,
    )


BROKEN = verdict("build_failed", stage="queued")
WRONG = verdict("incorrect", stage="loaded")


def rollout(task: str, *verdicts: Verdict) -> Trajectory:
    turns = [Turn(text="t", stop="eos", source="s", verdict=v) for v in verdicts]
    return Trajectory(agent="policy", task=task, group=task, turns=turns)


# --- scores ------------------------------------------------------------------------------------------------


def test_scores_are_over_all_samples_failures_included():
    found = score([rollout("a", v) for v in (BROKEN, WRONG, verdict(speedup=0.5), verdict(speedup=2.0))])
    assert found.samples == 4
    assert (found.compiled, found.correct) == (0.75, 0.5)
    assert found.fast == {1.0: 0.25, 1.2: 0.25, 1.5: 0.25, 2.0: 0.0}, "exactly p times as fast does not count, as in KernelBench"
    assert found.mean_speedup == pytest.approx(2.5 / 4)
    assert found.geomean_correct == pytest.approx(1.0)


def test_a_speedup_counts_only_where_the_kernel_is_correct():
    found = score([rollout("a", verdict("integrity", speedup=50.0))])
    assert (found.correct, found.mean_speedup, found.geomean_correct, found.fast[1.0]) == (0.0, 0.0, 0.0, 0.0)


def test_a_correct_kernel_without_a_measured_speed_is_correct_but_not_fast():
    found = score([rollout("a", verdict(stage="correct")), rollout("a", verdict(speedup=4.0))])
    assert (found.correct, found.fast[1.0], found.geomean_correct) == (1.0, 0.5, pytest.approx(4.0))


def test_the_last_turn_counts_unless_another_is_asked_for():
    trajectories = [rollout("a", WRONG, verdict(speedup=3.0)), rollout("a", verdict(speedup=1.0))]
    assert score(trajectories).mean_speedup == 2.0
    assert score(trajectories, turn=0).mean_speedup == 0.5


def test_no_trajectories_have_no_score():
    with pytest.raises(ValueError, match="nothing to score"):
        score([])


def test_saved_scores_are_by_turn_and_by_task(tmp_path):
    path = tmp_path / "eval.json"
    short = rollout("b", verdict(speedup=1.0))  # no room for a second turn: its only one is its last
    data = all_scores([rollout("a", WRONG, verdict(speedup=3.0)), rollout("a", WRONG, WRONG), short], turns=2)
    save_scores(path, data)
    assert json.loads(path.read_text()) == data, "what is returned is what a later phase reads back"
    assert data["last_turn"]["correct"] == pytest.approx(2 / 3)
    assert [(t["samples"], t["correct"]) for t in data["turns"]] == [(3, pytest.approx(1 / 3)), (2, 0.5)]
    assert {name: (t["samples"], t["mean_speedup"]) for name, t in data["tasks"].items()} == {
        "a": (2, 1.5),
        "b": (1, 1.0),
    }
    assert set(data["last_turn"]["fast"]) == {"1.0", "1.2", "1.5", "2.0"}
    assert [p.name for p in tmp_path.iterdir()] == ["eval.json"], "written whole or not at all"


def test_a_turn_that_no_trajectory_had_room_for_loses_nothing():
    data = all_scores([rollout("a", verdict(speedup=3.0))], turns=2)
    assert data["last_turn"]["correct"] == 1.0 and len(data["turns"]) == 1


def test_the_final_table_shows_before_and_after():
    before = all_scores([rollout("a", WRONG), rollout("a", WRONG)], turns=1)
    after = all_scores([rollout("a", WRONG), rollout("a", verdict(speedup=3.0))], turns=1)
    skills = {"proposed": 7, "verified": 5, "active": 2}
    table = final_table({"before": before, "after": after, "skills": skills, "paths": {"report": "r.html"}})
    rows = {line.split("  ")[0].strip(): line.split()[1:] for line in table.splitlines() if line}
    assert rows["correct"] == ["0.0", "%", "50.0", "%"]
    assert rows["mean speedup *"][-4:] == ["0.00", "x", "1.50", "x"]
    assert "7 proposed, 5 verified, 2 active" in table and "r.html" in table


# --- the protocol ------------------------------------------------------------------------------------------


class FakeSpeaker:
    """Answers each prompt with the number of the turn, or what `reply` says, and remembers what it heard."""

    def __init__(self, reply=None):
        self.heard: list[tuple[Trajectory, str, int]] = []
        self._reply = reply or (lambda trajectory, prompt: f"kernel of turn {len(trajectory.turns)}")

    def fits(self, prompt, max_new):
        return True

    def speak(self, trajectories, prompts, seeds, *, max_new, keep=False, fresh=False):
        for trajectory, prompt, seed in zip(trajectories, prompts, seeds, strict=True):
            self.heard.append((trajectory, prompt, seed))
            trajectory.turns.append(Turn(text=self._reply(trajectory, prompt), stop="eos"))
        return [True] * len(trajectories)


class FakeJudge:
    """Correct from the second turn on."""

    def __init__(self):
        self.asked: list[tuple[str, str, str]] = []

    def evaluate(self, requests, *, phase, progress=None, timed=True, trusted=False):
        self.asked += [(phase, r.task.name, r.source) for r in requests]
        if progress is not None:
            progress(len(requests))
        return [WRONG if r.source.endswith("0") else verdict(speedup=2.0) for r in requests]


def run(policy, *, greedy=None, judge=None, active=(), **fields) -> list[Trajectory]:
    values = dict(
        config=CONFIG, samples=2, turns=2, seed=5, phase="eval", greedy_speaker=greedy or FakeSpeaker()
    )
    return evaluate(policy, judge or FakeJudge(), TASKS, active, **(values | fields))


def test_each_task_is_sampled_and_each_turn_judged():
    policy, judge, counted = FakeSpeaker(), FakeJudge(), []
    found = run(policy, judge=judge, progress=counted.append)
    assert [(t.task, t.member) for t in found] == [(task.name, m) for task in TASKS for m in range(2)]
    assert [phase for phase, *_ in judge.asked] == ["eval/turn0"] * 6 + ["eval/turn1"] * 6
    assert sum(counted) == 12
    assert score(found).correct == 1.0 and score(found, turn=0).correct == 0.0
    second = [prompt for trajectory, prompt, _ in policy.heard[6:]]
    assert all("incorrect" in prompt for prompt in second), "the second turn is told the verdict on the first"


def test_samples_have_seeds_of_their_own_that_do_not_depend_on_the_other_tasks():
    policy, alone = FakeSpeaker(), FakeSpeaker()
    run(policy)
    evaluate(
        alone,
        FakeJudge(),
        TASKS[1:2],
        (),
        config=CONFIG,
        samples=2,
        turns=2,
        seed=5,
        phase="eval",
        greedy_speaker=alone,
    )
    seeds = {(t.task, t.member, i // 6): seed for i, (t, _, seed) in enumerate(policy.heard)}
    assert len(set(seeds.values())) == 12
    assert [seed for _, _, seed in alone.heard] == [
        seeds[TASKS[1].name, m, turn] for turn in (0, 1) for m in (0, 1)
    ]


def test_an_empty_library_asks_no_selection():
    greedy = FakeSpeaker()
    found = run(FakeSpeaker(), greedy=greedy)
    assert greedy.heard == [] and all(t.skills == () for t in found)


def _skill(name: str) -> Skill:
    content = f"Motivation: m.\nKey Idea: the idea of {name}.\nExample: for (;;) {{}}"
    return Skill(
        name=name, description=f"what {name} does", scope="general", tags=("a", "b", "c"), content=content,
        id=name, status="active",
    )  # fmt: skip


def test_one_greedy_scheme_a_task_is_chosen_and_its_skills_are_shown_to_every_sample():
    from dk_jax.agents import selection

    chooser = FakeSpeaker(lambda trajectory, prompt: selection.format(["rows"], style="compact"))
    policy = FakeSpeaker()
    found = run(policy, greedy=chooser, active=[_skill("simd"), _skill("rows")])
    assert [t.task for t, _, _ in chooser.heard] == [task.name for task in TASKS], "one choice a task"
    assert all(t.skills == ("rows",) for t in found)
    first = [prompt for _, prompt, _ in policy.heard[:6]]
    assert all("idea of rows" in prompt and "idea of simd" not in prompt for prompt in first)


def test_a_malformed_choice_means_no_skills():
    chooser = FakeSpeaker(lambda trajectory, prompt: "I would rather not")
    found = run(FakeSpeaker(), greedy=chooser, active=[_skill("simd")])
    assert all(t.skills == () for t in found)
