"""Every recipe is whole as it stands, and at toy size trains two RL steps in which what is its own shows."""

from __future__ import annotations

import gc
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.demo import get_config as demo
from dk_jax.evaluation import heldout
from dk_jax.metrics import read_scalars
from dk_jax.models.config import AGENTS
from dk_jax.models.presets import PRESETS
from dk_jax.rollout.digest import skill_usage
from dk_jax.rollout.trajectory import Trajectory, load_trajectories
from dk_jax.train import rl_phase, setup
from dk_jax.train import run as run_module
from dk_jax.train.checks import check_config, check_tasks
from dk_jax.train.rl_phase import RLPhase
from dk_jax.train.setup import ConfigError
from tests.dk_jax.toy_recipes import RECIPES, ToyRun, recipe, toy


def keys_of(tree, prefix=""):
    return {key for name, value in tree.items() for key in (keys_of(value, f"{prefix}{name}.") if hasattr(value, "items") else {prefix + name})}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_as_it_stands_is_checked_without_allocating_its_model(name):
    cfg = recipe(name)
    gc.collect()  # what other tests left behind would go meanwhile
    before = len(jax.live_arrays())
    check_config(cfg)
    assert cfg.model.init in PRESETS and len(jax.live_arrays()) == before
    assert not keys_of(cfg) - keys_of(demo()), "every key of a recipe is one that something reads"
    check_tasks(cfg, setup.load_tasks(cfg))
    assert cfg.rl.microbatch % cfg.learner.mesh.fsdp == cfg.rollout.max_rows % cfg.learner.mesh.fsdp == 0


def trained(tmp_path_factory, name: str, skills: int = 0):
    """(first step's trajectories, both steps' metrics, what agents were asked, library) of a toy's two steps."""
    workdir = tmp_path_factory.mktemp(name)
    run = ToyRun(toy(name), workdir, skills=skills)
    try:
        start = jax.tree.map(np.asarray, run.model.trainable)
        state = run.rl(run.sft().trainable)
        moved = max(float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(state.trainable), strict=True))
        assert state.step == 2 and moved > 0
        steps = read_scalars(workdir / "metrics.jsonl", "rl")
        assert [line["step"] for line in steps] == [1, 2] and all(line["grad_norm"] > 0 for line in steps)
        rollouts = [load_trajectories(workdir / "rollouts" / f"step_{step:05d}.jsonl") for step in (1, 2)]
        return rollouts, steps, run.asked, run.library
    finally:
        run.close()


def policy(rollouts) -> list[Trajectory]:
    return [t for t in rollouts if t.agent == "policy"]


def verdicts(rollouts):
    return [v for t in policy(rollouts) for v in t.verdicts]


def returns(rollouts, gamma: float) -> np.ndarray:
    """G[i, t] of policy rollouts that took all their turns."""
    rewards = np.array([t.rewards for t in rollouts])
    turns = rewards.shape[1]
    return np.stack([sum(gamma ** (u - t) * rewards[:, u] for u in range(t, turns)) for t in range(turns)], axis=1)


def leave_one_out(values: np.ndarray) -> np.ndarray:
    """Of each column over its rows."""
    return values - (values.sum(0) - values) / (len(values) - 1)


def by_task(rollouts) -> list[list[Trajectory]]:
    found: dict[str, list[Trajectory]] = {}
    for t in policy(rollouts):
        found.setdefault(t.task, []).append(t)
    return list(found.values())


def test_davinci_trains_three_agents_and_proves_skills_by_the_papers_rule(tmp_path_factory):
    small, large = toy("davinci_8b"), toy("davinci_14b")
    assert small == large and (recipe("davinci_8b").model.init, recipe("davinci_14b").model.init) == ("qwen3-8b", "qwen3-14b")
    rollouts, steps, asked, library = trained(tmp_path_factory, "davinci_14b", skills=3)
    assert {agent for agent, _ in asked} == set(AGENTS)
    for found in rollouts:
        assert {t.scheme for t in policy(found)} == {0, 1} and any(t.skills for t in policy(found))
        for v in verdicts(found):
            assert v.reward == pytest.approx(v.correct * (0.5 + 0.5 * min(v.speedup, 6.0) + 0.5 * (v.coverage or 0.0)))
    assert all(line["selection_skills"] > 0 and line["dropped_null"] == 2 for line in steps)
    assert sum(line["dropped_profiling"] for line in steps) > 0 and all(line["mismatch_ratio_p50_policy"] == pytest.approx(1.0) for line in steps)
    assert sum(line["proposals"] for line in steps) > 0 and library.counts()["verified"] + library.counts()["proposed"] > 3


def test_drkernel_trains_the_policy_alone_with_leave_one_out_and_both_rejections(tmp_path_factory):
    (first, second), steps, asked, _ = trained(tmp_path_factory, "drkernel_14b")
    assert {agent for agent, _ in asked} == {"policy"} and not any("Skill" in prompt for _, prompt in asked)
    assert {t.agent for t in first + second} == {"policy"} and all("sequences_selection" not in s or s["sequences_selection"] == 0 for s in steps)
    for v in verdicts(first):
        assert v.reward == pytest.approx(v.correct * (1.0 + min(v.speedup, 3.0) + (v.coverage or 0.0)))
    assert any(v.speedup > 3.0 for v in verdicts(first))
    rejected = 0
    for group in by_task(first):
        wanted = leave_one_out(returns(group, 1.0))
        for t, row in zip(group, wanted, strict=True):
            for v, advantage, own in zip(t.verdicts, t.advantages, row, strict=True):
                lazy = v.correct and v.coverage < 0.3
                rejected += lazy
                assert advantage == pytest.approx(0.0 if lazy else own, abs=1e-5)
    assert steps[0]["dropped_profiling"] == rejected > 0
    assert all(line["mismatch_ratio_p50_policy"] == pytest.approx(1.0, abs=1e-4) and line["dropped_mismatch_policy"] == 0 for line in steps)


def test_kevin_normalises_over_all_turns_and_forgets_its_reasoning(tmp_path_factory):
    (first, _), steps, asked, _ = trained(tmp_path_factory, "kevin_32b")
    for v in verdicts(first):
        assert v.reward == pytest.approx(v.correct * (0.3 + v.speedup))
    for group in by_task(first):
        found = returns(group, 0.4)
        wanted = (found - found.mean()) / found.std()
        np.testing.assert_allclose([t.advantages for t in group], wanted, atol=1e-4)
    assert steps[0]["sequences_policy"] == len(policy(first)) * 2, "a sequence a turn"
    assert all(len(t.starts) == 1 and t.tokens[t.starts[0]] == t.tokens[0] for t in policy(first))
    later = [prompt for _, prompt in asked if "Attempt 1" in prompt]
    assert len(later) == len(asked) / 2 and not any("secret" in prompt for _, prompt in asked)
    number = later[0].split("pass # ")[1].split()[0]
    assert f"Your summary: My trick was {number}." in later[0] and "Verdict: " in later[0] and "class Model(" in later[0]
    assert "Below it say in two or three sentences" in asked[0][1]
    assert not any(name.startswith("mismatch_") for line in steps for name in line) and steps[0]["dropped_profiling"] == 0


def test_cuda_agent_is_paid_by_milestones_against_both_baselines(tmp_path_factory):
    (first, second), steps, asked, _ = trained(tmp_path_factory, "cuda_agent")
    found = verdicts(first + second)
    for v in found:
        milestone = 1 + (v.speedup > 1.05) + (0.5 * v.speedup > 1.05) if v.correct else -1  # torch.compile takes half of eager's time
        assert v.reward == milestone
    assert {v.reward for v in found} == {-1.0, 1.0, 2.0, 3.0}
    assert {agent for agent, _ in asked} == {"policy"} and all(not t.starts for t in policy(first)), "one growing conversation"
    assert steps[0]["sequences_policy"] + steps[0]["drop_share_policy"] * len(policy(first)) == pytest.approx(len(policy(first)))


def collected(tmp_path, skills=3, **changes):
    """The first step's rollouts of a davinci toy, what agents were asked, and the run, which stays open."""
    run = ToyRun(toy("davinci_14b", **changes), tmp_path, skills=skills)
    with RLPhase(run) as phase:
        state = phase.newest(run.model.trainable)
        rollouts = phase.collect(phase.present(state), state.step, run.sampler(temperature=1.0), run.judge("rl"), run.verifier)
    return rollouts, run.asked, run


def test_retrieval_alone_may_choose(tmp_path):
    rollouts, asked, run = collected(tmp_path, **{"rollout.selector": "bm25", "rollout.max_skills": 2, "skills.max_triggers": 0})
    assert not rollouts.of("selection") and {agent for agent, _ in asked} == {"policy"}
    skills = {t.scheme: t.skills for t in rollouts.of("policy")}
    assert len(skills[0]) == 2 and skills[1] == ()
    shown = [prompt for _, prompt in asked if skills[0][0] in prompt and "Verdict" not in prompt]
    assert len(shown) == len([t for t in rollouts.of("policy") if t.scheme == 0]), "in each first prompt, full text"
    used = list(skill_usage(rollouts, null=1, floor=0.25))
    assert sorted(name for name, _ in used) == sorted(2 * skills[0]) and all(len(use["log_effects"]) == 1 for _, use in used)
    speaker = run.speaker(run.sampler(temperature=1.0), run.model.trainable)
    scored = heldout.evaluate(
        speaker, run.judge("eval"), run.tasks.held_out[:1], run.library.active(), config=run.rollout_config, samples=1, turns=1, seed=0,
        phase="eval", greedy_speaker=speaker,
    )  # fmt: skip
    assert len(scored[0].skills) == 2
    run.close()


def test_without_skills_there_are_neither_selections_nor_summaries(tmp_path):
    rollouts, asked, run = collected(tmp_path, **{"skills.use": False})
    assert {agent for agent, _ in asked} == {"policy"} and {t.agent for t in rollouts.trajectories} == {"policy"}
    assert not any(t.skills for t in rollouts.trajectories) and not rollouts.proposals
    run.close()


def test_the_policy_alone_may_train_with_skills_still_injected(tmp_path):
    run = ToyRun(toy("davinci_14b", **{"rl.agents": ("policy",), "rl.steps": 1}), tmp_path, skills=3)
    run.rl(run.sft().trainable)
    (line,) = read_scalars(tmp_path / "metrics.jsonl", "rl")
    assert line["sequences_policy"] > 0 and line["sequences_selection"] == line["sequences_summary"] == 0 and line["dropped_agent"] > 0
    assert any(t.skills for t in load_trajectories(tmp_path / "rollouts" / "step_00001.jsonl") if t.agent == "policy")
    run.close()


def test_evaluation_may_leave_the_skills_where_they_are(tmp_path):
    for inject in (True, False):
        (tmp_path / str(inject)).mkdir()
        run = ToyRun(toy("davinci_14b", **{"evaluation.inject": inject}), tmp_path / str(inject), skills=3)
        run.evaluate("eval_rl", run.model.trainable, step=0)
        agents = {agent for agent, _ in run.asked}
        assert agents == ({"policy", "selection"} if inject else {"policy"})
        assert any("## Skills" in prompt for agent, prompt in run.asked if agent == "policy") == inject
        run.close()


def test_skills_rest_by_what_they_do_if_the_recipe_says_so(tmp_path, monkeypatch):
    """With rules under which hardly any skill helps enough: each change is in the log of its step, and in the metrics."""
    strict = {"on": True, "least_effects": 0.5, "dormant_below": 0.999, "rest_steps": 1, "most_rests": 1, "alike": 2.0}
    run = ToyRun(toy("davinci_8b", **{f"skills.lifecycle.{key}": value for key, value in strict.items()}, **{"rl.steps": 3}), tmp_path, skills=3)
    written: list[Path] = []
    monkeypatch.setattr(run_module, "write_report", written.append)
    monkeypatch.setattr(rl_phase, "REPORT_PAUSE_S", 0.0)
    try:
        run.rl(run.sft().trainable)
        assert written == [tmp_path] * 2, "with each checkpoint that the pause allows"
        run.report_so_far(3600.0)
        assert len(written) == 2
        steps = read_scalars(tmp_path / "metrics.jsonl", "rl")
        status = [(e.step, e.event.data) for e in run.library.history() if e.event.kind == "status"]
        changes = [(step, data) for step, data in status if data["status"] in ("dormant", "retired")]
        assert changes and all("it helps with probability" in data["reason"] for _, data in changes)
        assert {data["status"] for _, data in changes} == {"dormant", "retired"}
        counts = run.library.counts()
        assert (steps[-1]["skills_dormant"], steps[-1]["skills_retired"]) == (counts["dormant"], counts["retired"])
        assert min(step for step, _ in changes) >= 1 and counts["retired"] > 0
    finally:
        run.close()


def test_verification_is_a_choice(tmp_path):
    rules = {}
    for rule in ("paper", "paired"):
        (tmp_path / rule).mkdir()
        rollouts, _, run = collected(tmp_path / rule, **{"skills.verification": rule})
        judged = [p for p in rollouts.proposals if p.decision is not None]
        rules[rule] = {p.decision.n for p in judged}
        assert judged
        run.close()
    assert rules["paper"] != rules["paired"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rollout.selector", "bm52", r"rollout\.selector is 'bm52': use one of 'llm', 'bm25'"),
        ("rollout.context", "kernel", r"rollout\.context is 'kernel'"),
        ("rl.agents", (), r"rl\.agents is \(\)"),
        ("rl.agents", ("polic",), "name at least one of selection, policy, summary"),
        ("sft.steps", -1, r"sft\.steps is -1"),
        ("skills.lifecycle.rest_steps", 0, r"skills\.lifecycle\.rest_steps is 0; it must be above 0"),
        ("model.init", "qwen3-13b", "model.init is 'qwen3-13b'"),
    ],
)
def test_a_switch_that_is_no_choice_is_named(key, value, message):
    cfg = recipe("davinci_14b")
    cfg.update_from_flattened_dict({key: value})
    with pytest.raises(ConfigError, match=message):
        check_config(cfg)
