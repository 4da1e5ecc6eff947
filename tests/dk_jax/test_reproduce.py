"""The ablation's arms, jobs, pieces, ledger and bundles, without a run."""

from __future__ import annotations

import json
import math
import sys
import time

import pytest
from scipy import stats

from configs.ablation import get_preset
from dk_jax.evaluation.fast_p import Measured
from dk_jax.evaluation.results import Result
from dk_jax.reproduce import bundle, digests, ledger, published, scores, skills_told
from dk_jax.reproduce.arms import ARMS, AblationError, chosen, jobs, load_preset
from dk_jax.reproduce.pieces import Piece, PieceLog, PieceOver, card, cards_of, read_pieces
from dk_jax.reproduce.work import PIECES, SETTINGS, Ablation, parts
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict
from dk_jax.tasks.builtin import builtin_suite
from dk_jax.train import setup
from dk_jax.train.checks import check_config
from tests.end_to_end.ablation import toy_preset


def flat(cfg, prefix=""):
    for key, value in cfg.items():
        if hasattr(value, "items"):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# --- arms and jobs --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["smollm2", "cpu"])
def test_an_arm_changes_what_it_says_and_nothing_else(scale):
    preset = get_preset(scale)
    full = dict(flat(preset.recipe(ARMS[0], 1)))
    check_config(preset.start_recipe(preset.start_of(ARMS[0], 1)))
    for arm in ARMS:
        cfg = preset.recipe(arm, 1)
        check_config(cfg)
        own = dict(flat(cfg))
        changed = {key for key in own if own[key] != full[key]}
        wanted = set(arm.changes) - {key for key in arm.changes if full[key] == arm.changes[key]}
        wanted |= {"rollout.rollouts"} if arm.name == "no_skills" else set()
        wanted |= {"corpus.diversity.on"} if arm.name == "no_diversity_filter" else set()
        assert changed == wanted and (changed or arm.name in ("full", "no_injection")), arm.name
        assert (own["rollout.selections"] + 1) * own["rollout.rollouts"] == (full["rollout.selections"] + 1) * full["rollout.rollouts"]
        assert own["seed"] == 1
    assert min(len(preset.seeds_of(arm)) for arm in ARMS if arm.name in ("full", "no_injection", "no_skills")) >= 3


def test_the_learnable_tasks_hold_out_siblings_and_families_apart():
    cfg = get_preset("smollm2").base
    cfg.tasks.generated = 0
    tasks = setup.load_tasks(cfg)
    found = parts(tasks)
    assert set(found) == {task.name for task in tasks.held_out}
    trained = {task.family for task in tasks.train}
    siblings = {task.family for task in tasks.held_out if found[task.name] == "siblings"}
    assert siblings and siblings <= trained and not trained & {t.family for t in tasks.held_out if found[t.name] == "families"}
    assert 5 < list(found.values()).count("families") < list(found.values()).count("siblings")


def test_jobs_come_in_an_order_in_which_each_has_what_it_needs():
    preset = get_preset("smollm2")
    found = jobs(preset, ARMS)
    names = [job.name for job in found]
    assert len(set(names)) == len(names) and names.count("expert") == 1 and sum(name.startswith("start ") for name in names) == 2
    assert names.index("evaluate no_skills_seed0") < names.index("train full_seed1") and "train no_injection_seed0" not in names
    for job in found:
        if job.kind in ("train", "evaluate_start"):
            assert names.index(f"start {job.start.name}") < names.index(job.name)
        if job.kind == "evaluate":
            assert names.index(f"train {job.arm.trained}_seed{job.seed}") < names.index(job.name)
    assert [job.seed for job in jobs(preset, chosen(["no_injection"]), [4, 7]) if job.kind == "train"] == [4, 7]
    assert {job.start.name for job in jobs(get_preset("cpu"), chosen(["full"]))} == {"base_seed0", "base_seed1", "base_seed2"}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda: chosen(["ful"]), "--arms=ful: no such arm; there are full, no_injection"),
        (lambda: load_preset("nothing", "smollm2"), "there is no configs/nothing.py"),
        (lambda: load_preset("ablation", "huge"), "configs/ablation.py has no such preset"),
        (lambda: load_preset("demo", "smollm2"), "configs/demo.py has no such preset"),
        (lambda: toy_preset(candidates=0), "a budget of 0 candidates"),
        (lambda: toy_preset(seeds={"half": (0,)}), r"seeds for arms that are not there: \['half'\]"),
        (lambda: jobs(toy_preset(), ARMS), "the base recipe has corpus.diversity.on=False"),
    ],
)
def test_what_can_not_be_is_told(what, said):
    with pytest.raises(AblationError, match=said):
        what()


@pytest.mark.parametrize(("key", "value"), [("rl.decay", True), ("rl.staleness", 1), ("rl.checkpoint_every", 2), ("tasks.rl_fresh", 5)])
def test_a_base_recipe_that_can_not_be_stopped_by_a_budget_is_refused(key, value):
    base = toy_preset().base
    base.update_from_flattened_dict({key: value})
    with pytest.raises(AblationError, match=key.split(".")[1]):
        toy_preset(base=base)


# --- pieces ---------------------------------------------------------------------------------------------------------------------------


def test_a_piece_ends_where_the_next_part_would_not_fit():
    now = [0.0]
    piece = Piece(100.0, now=lambda: now[0])
    ended = []
    for seconds in (60.0, 10.0, 10.0, 11.0, 10.0):  # the first part has compiling in it
        now[0] += seconds
        ended.append(piece.over())
    assert ended == [True, True, False, True, True]
    now[0] = 0.0
    piece = Piece(100.0, now=lambda: now[0])
    piece.begin()
    now[0] = 49.0
    assert not piece.over()
    now[0] = 98.0
    assert piece.over()


def test_work_without_boundaries_is_interrupted():
    with pytest.raises(PieceOver), Piece(0.05).bounded():
        time.sleep(30)
    with Piece(1000.0).bounded():
        pass


def test_a_module_that_is_being_imported_is_not_interrupted(tmp_path, monkeypatch):
    (tmp_path / "imported_slowly.py").write_text("import time\nfor _ in range(20):\n    time.sleep(0.02)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PieceOver), Piece(0.05).bounded():
        import imported_slowly

        assert imported_slowly.whole
        time.sleep(30)
    assert sys.modules.pop("imported_slowly").whole


def test_pieces_tell_their_card_and_a_line_cut_short_is_skipped(tmp_path):
    host = {"processor": "Xeon", "cores": "4", "gpu": "NVIDIA H200, 580.159.04"}
    assert (card("cuda:0", host), card("cpu", host)) == ("NVIDIA H200", "CPU Xeon, 4 cores")
    log = PieceLog(tmp_path / PIECES, device="cpu")
    log.begins("train full_seed0")
    with open(tmp_path / PIECES, "a") as file:
        file.write('{"job": "evalu')
    log.begins("evaluate full_seed0")
    found = read_pieces(tmp_path / PIECES)
    assert [line["job"] for line in found] == ["train full_seed0", "evaluate full_seed0"] and found[0]["versions"]["jax"]
    by_card = cards_of([*found, {"job": "expert", "card": "NVIDIA H100"}])
    assert by_card == {log.card: ["train full_seed0", "evaluate full_seed0"], "NVIDIA H100": ["expert"]}


# --- ledger ---------------------------------------------------------------------------------------------------------------------------


def spent(candidates, last, tokens=100):
    return ledger.Spent(steps=3, rollouts=candidates - 8, proofs=8, tokens={"policy": tokens}, last=(last, 10))


def test_the_ledger_finds_what_is_not_equal():
    tasks = {("full", 0): [["a"], ["b"]], ("no_skills", 0): [["a"], ["b"], ["c"]]}
    budget = dict(candidates=100, tokens=1000)
    equal = {("full", 0): spent(110, 30), ("no_skills", 0): spent(100, 20)}
    assert ledger.problems(equal, tasks, **budget) == []
    assert ledger.problems({("full", 0): spent(99, 30)}, tasks, **budget) == ["full, seed 0 ended before its budget was spent"]
    assert ledger.problems({("full", 0): spent(140, 30)}, tasks, **budget) == ["full, seed 0 went on for a step after its budget was spent"]
    assert "ended by its tokens, with 90 of 100" in ledger.problems({("full", 0): spent(90, 30, tokens=1005)}, tasks, **budget)[0]
    assert ledger.problems(equal, tasks | {("full", 0): [["b"], ["a"]]}, **budget) == ["seed 0: the arms' steps have different tasks"]
    assert spent(110, 30).verification_share == 8 / 110


# --- digests and skills ---------------------------------------------------------------------------------------------------------------


def verdict(speedup=0.0, outcome="ok", findings=()):
    return Verdict(outcome=outcome, stage="timed", reward=0.0, speedup=speedup, noisy=False, coverage=None, feedback="", findings=findings)


def rollout(task, scheme, *verdicts, skills=()):
    turns = [Turn(text="", stop="eos", source="x", verdict=v) for v in verdicts]
    return Trajectory(agent="policy", task=task, group=task, scheme=scheme, turns=turns, skills=skills)


def test_a_step_is_digested_into_violations_and_effects_within_a_task():
    trajectories = [
        rollout("a", 0, verdict(1.0), verdict(2.0), skills=("s",)),
        rollout("a", 1, verdict(1.0), verdict(outcome="integrity", findings=("library_call", "too_fast"))),
        rollout("b", 0, verdict(3.0), verdict(outcome="integrity")),
        rollout("b", 1, verdict(1.5), verdict(1.0)),
    ]
    found = digests.step_digest(trajectories, step=7, null=1, floor=0.25)
    assert found["tasks"] == ["a", "b"] and (found["turns"], found["violations"]) == (8, 2)
    assert found["rules"] == {"library_call": 1, "too_fast": 1, "integrity": 1} and found["outcomes"] == {"ok": 6, "integrity": 2}
    [(task, skills, log_effect)] = found["effects"]  # of b the chosen scheme has no skill
    assert (task, skills) == ("a", ["s"]) and log_effect == pytest.approx(math.log(2.0))
    lines = [found, found | {"effects": [["a", ["s"], 0.1], ["a", ["t"], 0.3], ["b", ["s"], 0.4]]}]
    own = [math.log(2.0), 0.2, 0.4]
    told = skills_told.effect(lines)
    low, high = stats.t.interval(0.95, 2, loc=sum(own) / 3, scale=stats.sem(own))
    assert (told["comparisons"], told["schemes"]) == (3, 4)
    assert [math.log(told[name]) for name in ("ratio", "low", "high")] == pytest.approx([sum(own) / 3, low, high])
    assert skills_told.effect([found | {"effects": []}]) is None


# --- scores ---------------------------------------------------------------------------------------------------------------------------


def result(task, sample, speedup):
    trajectory = rollout(task, 0, verdict(speedup) if speedup else verdict(outcome="incorrect"))
    trajectory.member = sample
    return Result(trajectory=trajectory, level=1, family="f", split="held_out")


def test_scores_over_seeds_and_over_the_expert():
    own = {seed: [result("a", 0, a), result("b", 0, b)] for seed, (a, b) in enumerate([(2.5, 0.0), (1.1, 1.6), (0.9, 0.8)])}
    start = {seed: [result("a", 0, 0.5), result("b", 0, 0.0)] for seed in own}
    expert = [result("a", 0, 2.0), result("a", 1, 5.0), result("b", 0, 0.0)]
    ceiling = scores.ceilings(expert)
    assert ceiling == {"a": 5.0}
    row = scores.row(scores.Evaluations(own=own, starts=start), ceiling, resamples=200)
    fast = row["metrics"]["Fast_1"]
    assert fast["by_seed"] == {"0": 0.5, "1": 1.0, "2": 0.0} and fast["value"] == fast["mean"] == 0.5
    low, high = stats.t.interval(0.95, 2, loc=0.5, scale=stats.sem([0.5, 1.0, 0.0]))
    assert fast["half"] == pytest.approx((high - low) / 2) and 0 <= fast["low"] < 0.5 < fast["high"] <= 1
    assert row["metrics"][scores.SHARE_OF_EXPERT]["value"] == pytest.approx((0.5 + 0.22 + 0.18) / 3)
    assert row["metrics"]["mean speedup"]["value"] == pytest.approx(sum((2.5, 0.0, 1.1, 1.6, 0.9, 0.8)) / 6)
    rise = row["rises"]["correct"]
    assert rise["by_seed"] == {"0": 0.0, "1": 0.5, "2": 0.5} and rise["value"] == pytest.approx(1 / 3) and rise["tasks"] == 2
    assert scores.row(scores.Evaluations(own=own), ceiling, resamples=5)["rises"] == {}


def test_a_difference_is_clear_only_by_all_of_its_intervals():
    clear = dict(low=0.1, high=0.3, mean=0.2, half=0.1)
    assert scores.sign(clear) == 1 and scores.sign(clear | dict(half=None)) == 1
    assert scores.sign(clear | dict(half=0.25)) == scores.sign(clear | dict(low=-0.1)) == scores.sign(None) == 0
    assert scores.sign(dict(low=-0.3, high=-0.1, mean=-0.2, half=0.1)) == -1
    one, other = ([Measured(task=name, speedup=speed) for name in "abcdef"] for speed in (1.0, 2.5))
    found = scores.contrast({0: one, 1: one}, {1: other, 0: other, 5: one}, "Fast_2", resamples=50)
    assert found["value"] == 1.0 and found["seeds"] == [0, 1] and found["half"] == 0.0 and scores.sign(found) == 1
    assert scores.contrast({0: one}, {1: other}, "Fast_2", resamples=5) is None


def test_the_papers_own_differences():
    assert published.differences("no_injection")["L2 Fast_1"] == pytest.approx(24.2) and published.differences("full") == {}
    assert [published.agreement(-6.8, sign) for sign in (1, 0, -1)] == ["disagrees", "not told apart here", "agrees"]


# --- bundles --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def filled(tmp_path, monkeypatch):
    """An ablation with a few files of each kind, in a bundle of several parts."""
    ablation = Ablation(toy_preset(), tmp_path / "one")
    names = [PIECES, "starts/base_seed0/start.json", "starts/base_seed0/checkpoints/2/data", "eval/expert/results.jsonl", "eval/expert/journal.jsonl"]
    for i, name in enumerate(names):
        path = ablation.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(bytes([(j * j * (i + 7) + j) % 251]) for j in range(5000)))
    monkeypatch.setattr(bundle, "PART_BYTES", 4096)
    monkeypatch.setattr(bundle, "MOST_PARTS", 5)
    return ablation, names, jobs(ablation.preset, chosen(["full"]))


def test_a_bundle_goes_in_parts_and_comes_out_as_it_was(filled, tmp_path):
    ablation, names, wanted = filled
    parts_ = bundle.export(ablation, wanted, tmp_path / "state.tar")
    assert 1 < len(parts_) <= 5 and [path.name for path in parts_] == [f"state.tar.{i}of{len(parts_)}" for i in range(1, len(parts_) + 1)]
    assert max(path.stat().st_size for path in parts_) <= 4096
    found = bundle.import_(tmp_path / "state.tar", tmp_path / "two")
    assert set(found) == {SETTINGS, *names}
    assert all((tmp_path / "two" / name).read_bytes() == (ablation.folder / name).read_bytes() for name in found)
    with pytest.raises(AblationError, match="holds an ablation already"):
        bundle.import_(tmp_path / "state.tar", tmp_path / "two")
    with pytest.raises(FileExistsError, match="is there already"):
        bundle.export(ablation, wanted, tmp_path / "state.tar")
    (tmp_path / "state.tar.1of9").touch()
    with pytest.raises(AblationError, match="parts of several bundles"):
        bundle.import_(tmp_path / "state.tar", tmp_path / "three")


def test_a_bundle_that_is_damaged_or_too_large_is_refused(filled, tmp_path, monkeypatch):
    ablation, _, wanted = filled
    parts_ = bundle.export(ablation, wanted, tmp_path / "state.tar")
    whole = parts_[1].read_bytes()
    for content, said in ((None, "is missing: a bundle needs all of its parts"), (whole[:100] + b"???" + whole[103:], "no whole bundle|is damaged")):
        parts_[1].unlink(missing_ok=True)
        if content is not None:
            parts_[1].write_bytes(content)
        with pytest.raises((AblationError, FileNotFoundError), match=said):
            bundle.import_(tmp_path / "state.tar", tmp_path / "two")
        assert not (tmp_path / "two" / SETTINGS).exists()
    with pytest.raises(FileNotFoundError, match="there is no such file, nor parts of it"):
        bundle.import_(tmp_path / "other.tar", tmp_path / "two")
    monkeypatch.setattr(bundle, "MOST_PARTS", 1)
    with pytest.raises(AblationError, match="more than 1 files of .* The largest: "):
        bundle.export(ablation, wanted, tmp_path / "again.tar")
    assert not list(tmp_path.glob("again*"))


def test_a_bundle_names_nothing_outside_of_the_folder(filled, tmp_path, monkeypatch):
    ablation, _, wanted = filled
    monkeypatch.setattr(bundle, "PART_BYTES", 1 << 20)
    dumps = json.dumps
    monkeypatch.setattr(bundle.json, "dumps", lambda data, **k: dumps(data, **k).replace("eval/expert/results", "../results"))
    bundle.export(ablation, wanted, tmp_path / "state.tar")
    monkeypatch.undo()
    with pytest.raises(AblationError, match="lies outside of the folder"):
        bundle.import_(tmp_path / "state.tar", tmp_path / "two")


def test_a_task_alone_in_its_family_is_of_a_held_out_family():
    suite = builtin_suite("cpu")
    found = parts(setup.TaskSets(train=suite.train, held_out=(*suite.held_out, suite.train[0]), generated=()))
    assert found[suite.train[0].name] == "siblings" and set(found[task.name] for task in suite.held_out) == {"families"}
