"""An ablation in pieces, killed and moved on the way, ends in the table of one that was left alone."""

from __future__ import annotations

import hashlib
import json
import shutil
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

from dk_jax.metrics import is_clocked, read_scalars
from dk_jax.reproduce import bundle, ledger, starts
from dk_jax.reproduce.arms import AblationError, chosen, jobs
from dk_jax.reproduce.collected import collect
from dk_jax.reproduce.work import SETTINGS, Ablation
from dk_jax.reproduce.write_up import page, write
from dk_jax.skills.library import SkillLibrary
from tests.end_to_end.ablation import ARMS, piece, toy_preset
from tests.end_to_end.scripted import Killed, ScriptedClient, ScriptedRun


def outcome(ablation, wanted):
    """What the table holds, less what tells of pieces and clocks."""
    data = collect(ablation, chosen(ARMS), wanted, resamples=50)
    return {name: value for name, value in data.items() if name not in ("written", "pieces", "cards", "versions")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder, outcome, and number of verdicts of an ablation in one piece."""
    folder, client = tmp_path_factory.mktemp("whole"), ScriptedClient()
    ablation, wanted, left = piece(folder, client=client)
    assert left == []
    return ablation, outcome(ablation, wanted), client.judged, wanted


def test_an_ablation_in_one_piece_spends_equal_budgets_and_tells_all_of_it(whole, tmp_path):
    ablation, data, _, wanted = whole
    spent = data["ledger"]
    assert data["unequal"] == [] and not data["partial"] and set(spent) == {"full 0", "no_skills 0"}
    assert all(90 <= line["candidates"] < 90 + 60 for line in spent.values())
    assert spent["full 0"]["proofs"] > 0 == spent["no_skills 0"]["proofs"] and spent["full 0"]["tokens"]["summary"] > 0
    assert spent["full 0"]["steps"] < spent["no_skills 0"]["steps"], "who verifies nothing makes more steps"
    rows = data["scores"]["families"]
    assert list(rows) == ["start_base", *ARMS] and data["scores"]["siblings"] == {}
    assert all(row["tasks"] == 6 and set(row["rises"]) == {"correct", "Fast_1", "Fast_1.5", "Fast_2"} for name, row in rows.items() if name in ARMS)
    for name, line in spent.items():
        own = read_scalars(ablation.folder / "runs" / name.replace(" ", "_seed") / "metrics.jsonl", "rl")
        assert line["candidates"] == sum(entry["spent_candidates"] + entry["spent_proofs"] for entry in own)
    results = {name: (ablation.folder / "eval" / f"{name}_seed0" / "results.jsonl").read_text() for name in ARMS}
    with_skills = {name: [json.loads(line)["trajectory"]["skills"] for line in text.splitlines()] for name, text in results.items()}
    assert any(with_skills["full"]) and not any(with_skills["no_injection"]) and not any(with_skills["no_skills"])
    write(tmp_path, collect(ablation, chosen(ARMS), wanted, resamples=50))
    text = (tmp_path / "ablation.md").read_text()
    for said in ("## Held-out families", "There are no held-out siblings in this task set", "no injection at inference", "not told apart", "1 seed"):
        assert said in text
    assert "Partial" not in text and "Pieces from different cards" not in text
    for path in tmp_path.glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg" and path.name in text
    [kernel] = data["kernels"]
    assert kernel["speedup"] == max(json.loads(x)["trajectory"]["turns"][-1]["verdict"]["speedup"] for x in results["full"].splitlines())
    assert kernel["source"] in text.replace("    ", "")
    evidence = [e for skill in SkillLibrary(ablation.folder / "runs/full_seed0/library.sqlite").skills() for e in skill.evidence]
    assert spent["full 0"]["proofs"] == sum(2 * e.n for e in evidence)


def test_a_page_says_what_is_missing_mixed_or_unequal(whole, tmp_path):
    _, data, _, _ = whole
    made = {"written": "", "pieces": 1, "cards": {}}
    assert "has too few seeds, of 3, to tell whether it meets the rise of 10 points Fast_1" in page(data | made, [])
    rows = json.loads(json.dumps(data["scores"]["families"]))
    rows["full"]["rises"] |= {
        "Fast_1": dict(value=0.2, low=0.1, high=0.3, mean=0.2, half=0.05, seeds=[0, 1, 2]),
        "Fast_1.5": dict(value=0.2, low=0.1, high=0.3, mean=0.2, half=0.25, seeds=[0, 1, 2]),
    }
    text = page(data | made | {"scores": {"siblings": {}, "families": rows}}, [])
    assert "full training meets the rise of 10 points Fast_1 outside of the intervals: +20.0 [+10.0, +30.0] ± 5.0 over 3 seeds." in text
    assert "full training does not meet the rise of 5 points Fast_1.5 outside" in text
    data = data | {"written": "now", "pieces": 2, "cards": {"H200": ["expert"], "H100": ["train full_seed0"]}, "partial": True, "open": ["train x"]}
    text = page(data | {"unequal": ["seed 0: the arms' steps have different tasks"]}, [])
    assert "**Partial**: 1 job not done: train x." in text
    assert "**Pieces from different cards**, whose speedups are not comparable: H200: expert; H100: train full_seed0." in text
    assert "**Not equal**: seed 0: the arms' steps have different tasks." in text and "each stopped at that step" not in text
    ablation = Ablation(toy_preset(), tmp_path)
    text = page(collect(ablation, chosen(ARMS), jobs(ablation.preset, chosen(ARMS)), resamples=5), [])
    for said in ("**Partial**", "Nothing has been spent yet.", "Nothing to compare yet.", "No library holds a skill yet.", "No steps yet."):
        assert said in text


def test_interrupted_killed_and_moved_it_ends_the_same(whole, tmp_path):
    _, wanted_data, judged, wanted = whole
    clients, folder, moves = [], tmp_path / "first", 0
    left = wanted
    for call in range(60):
        client = ScriptedClient(kill_at=9 if call % 3 == 1 else None)
        clients.append(client)
        try:
            ablation, wanted, left = piece(folder, client=client, most=1 if call % 3 else 2)
        except Killed:
            continue
        if not left:
            break
        if call in (3, 8):  # another machine goes on; of this one nothing is left
            target = tmp_path / f"state{call}.tar"
            files = bundle.export(ablation, wanted, target)
            moves += 1
            shutil.rmtree(folder)
            folder = tmp_path / f"machine{call}"
            bundle.import_(target, folder)
            assert sum(path.stat().st_size for path in files) < bundle.PART_BYTES
    assert left == [] and moves == 2
    assert any(client.kill_at is not None and client.judged == client.kill_at for client in clients), "some were killed"
    assert outcome(ablation, wanted) == wanted_data
    assert sum(client.judged for client in clients) <= judged + 16 * sum(client.kill_at is not None for client in clients)


def test_an_arm_that_began_elsewhere_goes_as_a_run_after_its_own_cold_start(whole, tmp_path):
    """Planting is what the trainer would have had: the same RL, bit for bit."""
    ablation, _, _, wanted = whole
    job = next(job for job in wanted if job.kind == "train" and job.arm.name == "full")
    cfg = ablation.recipe(job)
    cfg.rl.steps = ledger.spent(ablation.run_folder(job)).steps
    shutil.copytree(ablation.folder / "sft" / job.start.name, tmp_path, dirs_exist_ok=True)
    run = ScriptedRun(cfg, tmp_path, ScriptedClient())
    run.rl(run.sft().trainable)
    run.close()
    planted = ablation.run_folder(job)
    lines = [
        [{name: value for name, value in line.items() if not is_clocked(name)} for line in read_scalars(folder / "metrics.jsonl", "rl")]
        for folder in (tmp_path, planted)
    ]
    assert lines[0] == lines[1] and lines[0]
    rollouts = [sorted((folder / "rollouts").glob("step_*.jsonl")) for folder in (tmp_path, planted)]
    digests = [[hashlib.sha256(path.read_bytes()).hexdigest() for path in found] for found in rollouts]
    assert digests[0] == digests[1] and digests[0]


def test_a_start_that_is_damaged_or_another_one_is_refused(whole, tmp_path):
    ablation, _, _, wanted = whole
    folder = tmp_path / "start"
    shutil.copytree(ablation.start(wanted[0]), folder)
    starts.plant(folder, tmp_path / "arm")
    mark = json.loads((folder / starts.MARK).read_text())
    (folder / starts.MARK).write_text(json.dumps(mark | {"digest": "0" * 32}))
    with pytest.raises(AblationError, match="began with another cold start"):
        starts.plant(folder, tmp_path / "arm")
    run = ScriptedRun(ablation.recipe(wanted[0]), ablation.run_folder(wanted[1]), ScriptedClient())
    like = run.model.trainable
    run.close()
    with pytest.raises(AblationError, match="holds other parameters"):
        starts.load(folder, like)
    (folder / starts.MARK).write_text(json.dumps(mark))
    loaded = starts.load(folder, like)
    assert starts.digest(loaded) == mark["digest"] != starts.digest(jax.tree.map(np.zeros_like, like))
    data = next(path for path in sorted((folder / "checkpoints").rglob("*")) if path.is_file() and path.stat().st_size > 2000)
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    with pytest.raises(AblationError, match="is damaged"):
        starts.load(folder, like)


def test_a_folder_is_of_one_ablation(whole, tmp_path):
    ablation, _, _, wanted = whole
    (tmp_path / SETTINGS).write_text((ablation.folder / SETTINGS).read_text())
    with pytest.raises(AblationError, match="candidates: 90 -> 91"):
        Ablation(toy_preset(candidates=91), tmp_path)
    assert jobs(Ablation(toy_preset(), tmp_path).preset, chosen(ARMS)) == wanted
