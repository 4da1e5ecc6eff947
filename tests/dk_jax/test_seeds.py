"""The summary over seeds says what the runs say, and calls clear only what is."""

from __future__ import annotations

import json

import pytest

from scripts.bench import seeds


def scores(correct, speedup):
    fast = {"1.0": correct / 2, "1.2": 0.0, "1.5": correct / 4, "2.0": 0.0}
    return {"last_turn": {"samples": 8, "compiled": 0.9, "correct": correct, "fast": fast, "mean_speedup": speedup, "geomean_correct": 1.0}}


def run(path, seed, before, after, lr=1.0):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"seed": seed, "rl": {"lr": lr}}))
    (path / "eval_sft.json").write_text(json.dumps(scores(*before)))
    (path / "eval_rl.json").write_text(json.dumps(scores(*after)))
    row = {"phase": "rl", "step": 1, "skills_proposed": 4.0, "skills_verified": 2.0, "skills_active": 1.0}
    (path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return path


def test_a_rise_is_clear_only_above_the_spread_of_the_seeds(tmp_path, capsys):
    paths = [
        run(tmp_path / "a", 0, (0.50, 1.0), (0.55, 1.5)),
        run(tmp_path / "b", 1, (0.60, 1.1), (0.58, 1.6)),
        run(tmp_path / "c", 2, (0.40, 0.9), (0.52, 1.4)),
    ]
    seeds.main([*map(str, paths), "--out", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["summary"]["mean speedup"]["rise"] == pytest.approx([0.5, 0.5, 0.5])
    assert found["summary"]["mean speedup"]["clear"]
    assert found["summary"]["correct"]["before"] == pytest.approx([0.5, 0.1])
    assert not found["summary"]["correct"]["clear"] and not found["summary"]["correct"]["exceeds_spread"]
    text = capsys.readouterr().out
    assert "1.00 ± 0.10 x" in text and "+0.50 [+0.50, +0.50]  clear" in text and "4 / 2 / 1" in text


def test_a_rise_may_exceed_the_spread_without_being_clear(tmp_path):
    paths = [
        run(tmp_path / "a", 0, (0.50, 1.0), (0.55, 1.0)),
        run(tmp_path / "b", 1, (0.51, 1.0), (0.66, 1.0)),
        run(tmp_path / "c", 2, (0.49, 1.0), (0.50, 1.0)),
    ]
    seeds.main([*map(str, paths), "--out", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())["summary"]["correct"]
    assert found["rise"][0] == pytest.approx(0.07) and found["rise"][1] < 0 and not found["clear"]
    assert found["exceeds_spread"] == (0.07 > max(found["before"][1], found["after"][1]))
    tight = seeds.summarise([seeds.load(path) for path in paths[:2]])["correct"]
    assert tight["exceeds_spread"] and not tight["clear"]
    assert "+10.0 [" in seeds.table({"correct": tight}, [seeds.load(path) for path in paths[:2]])
    assert "exceeds the spread" in seeds.table({"correct": tight}, [seeds.load(path) for path in paths[:2]])


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    a = run(tmp_path / "a", 0, (0.5, 1.0), (0.6, 1.5))
    with pytest.raises(SystemExit, match="at least two"):
        seeds.main([str(a)])
    with pytest.raises(SystemExit, match="share a seed"):
        seeds.main([str(a), str(run(tmp_path / "b", 0, (0.5, 1.0), (0.6, 1.5)))])
    with pytest.raises(SystemExit, match="different recipes"):
        seeds.main([str(a), str(run(tmp_path / "c", 1, (0.5, 1.0), (0.6, 1.5), lr=2.0))])
    with pytest.raises(SystemExit, match="no finished run"):
        seeds.main([str(a), str(tmp_path / "none")])
