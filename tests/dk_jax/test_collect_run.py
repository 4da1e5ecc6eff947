"""The evidence folder shows the best correct kernel of each task and failures of every kind, as they were judged."""

from __future__ import annotations

import json

import pytest

from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict, save_trajectories
from scripts.bench import collect_run


def turn(outcome, speedup=0.0):
    verdict = Verdict(
        outcome=outcome, stage="timed" if outcome == "ok" else "built", reward=1.0 if outcome == "ok" else 0.0, speedup=speedup,
        noisy=False, coverage=0.9 if outcome == "ok" else None, feedback=f"said: {outcome}",
    )  # fmt: skip
    return Turn(text="text", stop="eos", source=f"kernel {outcome} {speedup}", verdict=verdict, reward=verdict.reward)


def trajectory(task, *turns, member=0):
    found = Trajectory(agent="policy", task=task, group=task, scheme=0, member=member, skills=("fuse",))
    found.turns = list(turns)
    return found


def test_a_run_becomes_a_small_folder(tmp_path):
    workdir, out = tmp_path / "run", tmp_path / "out"
    (workdir / "rollouts").mkdir(parents=True)
    (workdir / "config.json").write_text(json.dumps({"sandbox": {"language": "triton"}, "model": {"source": "/home/me/w.gguf", "lr": 1}}))
    (workdir / "metrics.jsonl").write_text("{}\n")
    save_trajectories(
        workdir / "rollouts" / "step_00001.jsonl",
        [trajectory("a", turn("ok", 1.5), turn("ok", 2.5)), trajectory("b", turn("incorrect"), turn("build_failed"))],
    )
    save_trajectories(workdir / "rollouts" / "step_00002.jsonl", [trajectory("a", turn("ok", 0.5), turn("incorrect"), member=1)])
    collect_run.main([str(workdir), str(out), "--rollouts", "3", "--command", "train it"])
    text = (out / "sample.md").read_text()
    assert text.count("## ") == 3
    assert "## a: ok, 2.50x over eager, coverage 90%" in text and "1.50x" not in text and "0.50x" not in text
    assert "## b: build_failed" in text and ": incorrect" in text and "> said: incorrect" in text
    facts = json.loads((out / "facts.json").read_text())
    assert facts["outcomes_by_step"] == {"1": {"ok": 2, "incorrect": 1, "build_failed": 1}, "2": {"ok": 1, "incorrect": 1}}
    assert facts["command"] == "train it" and facts["versions"]["jax"]
    assert json.loads((out / "config.json").read_text())["model"] == {"source": "w.gguf", "lr": 1}
    assert (out / "metrics.jsonl").exists() and not (out / "library.jsonl").exists()


def test_a_run_without_rollouts_is_named(tmp_path):
    with pytest.raises(SystemExit, match="no step_"):
        collect_run.main([str(tmp_path), str(tmp_path / "out")])
