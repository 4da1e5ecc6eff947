"""The report tells what a run did, says what is missing, names what is damaged and needs nothing else."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from configs.demo import get_config as demo
from dk_jax.evaluation import contents as contents_module
from dk_jax.evaluation.contents import load
from dk_jax.evaluation.examples import pick_examples
from dk_jax.evaluation.report import ReportError, write_report
from dk_jax.rollout.trajectory import Trajectory, save_trajectories
from dk_jax.tasks.builtin import builtin_suite
from tests.dk_jax.report_material import (
    NASTY,
    Page,
    few_draws,  # noqa: F401
    make_config,
    make_evaluation,
    make_library,
    make_metrics,
    trajectory,
    turn,
)

pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture
def finished(tmp_path) -> Path:
    """The workdir of a finished run."""
    make_config(tmp_path)
    make_metrics(tmp_path)
    make_evaluation(tmp_path, "eval_sft", 0.2)
    make_evaluation(tmp_path, "eval_rl", 0.9)
    make_library(tmp_path)
    return tmp_path


def test_a_finished_run_has_every_section_and_needs_nothing_else(finished):
    path = write_report(finished)
    assert path == finished / "report.html"
    page = Page(path)
    for title in (
        "Held-out tasks",
        "Learning curves",
        "Task by task",
        "Skills",
        "Kernels the model wrote",
        "How it was made",
    ):
        assert title in page.text
    assert "not finished" not in page.text and ("class", "missing") not in page.attributes
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert not [value for name, value in page.attributes if name == "src" or "://" in (value or "")]
    assert all(value.startswith("#") for name, value in page.attributes if name == "href")
    assert "@import" not in path.read_text() and not re.search(r"url\((?!#published)", path.read_text())
    assert list(finished.glob("*.part")) == []


def test_the_headline_shows_the_scores_of_both_evaluations_and_their_change(finished):
    before, after = (
        json.loads((finished / f"{name}.json").read_text())["last_turn"] for name in ("eval_sft", "eval_rl")
    )
    text = Page(write_report(finished)).section(" 95 % ")
    a, b = 100 * before["correct"], 100 * after["correct"]
    assert f"Correct {a:.1f} % {b:.1f} % {b - a:+.1f}" in text
    assert f"Mean speedup {before['mean_speedup']:.2f} × {after['mean_speedup']:.2f} ×" in text
    assert f"Fast 1.5 {100 * before['fast']['1.5']:.1f} % {100 * after['fast']['1.5']:.1f} %" in text


def test_the_interval_of_the_change_is_paired_over_tasks(finished):
    files = [finished / f"{name}.json" for name in ("eval_sft", "eval_rl")]
    before, after = (json.loads(file.read_text()) for file in files)
    for i, name in enumerate(before["tasks"]):
        before["tasks"][name]["mean_speedup"], after["tasks"][name]["mean_speedup"] = float(i), i + 0.5
    for file, data in zip(files, (before, after), strict=True):
        file.write_text(json.dumps(data))
    text = Page(write_report(finished)).section("Mean speedup")
    assert "± 0.00" in text[:60], "every task gains exactly 0.5, however much the tasks differ"


def test_held_out_tasks_are_listed_with_their_level_worst_losses_included(finished):
    data = json.loads((finished / "eval_rl.json").read_text())
    data["tasks"]["rms_norm_wide"] |= {"mean_speedup": 0.01, "correct": 0.25}
    (finished / "eval_rl.json").write_text(json.dumps(data))
    before = json.loads((finished / "eval_sft.json").read_text())["tasks"]["rms_norm_wide"]
    text = Page(write_report(finished)).section("Task by task")
    change = f"{0.01 - before['mean_speedup']:+.2f}".replace("-", "−")
    assert (
        f"rms_norm_wide 1 {100 * before['correct']:.0f} % 25 % {before['mean_speedup']:.2f} × 0.01 × {change}"
        in text
    )


def test_skills_are_listed_with_evidence_and_use_the_rejected_ones_last(finished):
    text = Page(write_report(finished)).section("Task by task").split(" Skills ", 1)[1]
    assert re.search(r"simd_inner_loop .*? active 1\.62 × 1\.42 – 1\.87 16 12 of 30 1\.30 × 1\.\d\d \(1\.\d\d – 1\.\d\d\), \d+ % 3 ", text)
    assert re.search(r"hoist_reciprocal .*? rejected 1\.06 × 0\.86 – 1\.31 16 0 of 0 – – 13 ", text)
    assert text.index("two_pass_softmax") < text.index("hoist_reciprocal")


def test_what_a_model_wrote_cannot_leave_its_box(finished):
    best = trajectory("gelu_activation_wide", turn("ok", 50.0, NASTY), skills=(NASTY,))
    best.turns[0].verdict = dataclasses.replace(best.turns[0].verdict, feedback=NASTY)
    nameless = trajectory(NASTY, turn("no_kernel", source="lone surrogate \udc80"))
    save_trajectories(finished / "rollouts" / "eval_rl.jsonl", [best, nameless])
    evaluation = json.loads((finished / "eval_rl.json").read_text())
    evaluation["tasks"][NASTY] = evaluation["tasks"]["rms_norm_wide"]
    (finished / "eval_rl.json").write_text(json.dumps(evaluation))
    page = Page(write_report(finished))
    assert page.tags.count("script") == len(re.findall("<script", page.source)) == 1 + 1 + len(page.rollouts), "its own, index, rollouts"
    assert page.text.count('alert("x")') >= 5, "source, feedback, skill, and the task in table and card are text"
    assert all("script" not in Page(html).tags for _, html in page.rollouts)
    assert page.text.count("<b>over</b>") == 2, "a skill's description and content are text"


def test_examples_show_the_best_a_gain_a_typical_one_and_each_common_failure():
    found = [
        trajectory("a", turn("ok", 3.0)),
        trajectory("a", turn("ok", 2.9)),
        trajectory("b", turn("ok", 2.0)),
        trajectory("c", turn("build_failed"), turn("ok", 1.8)),
        *[trajectory("d", turn("ok", 1.0 + 0.01 * i)) for i in range(3)],
        *[trajectory("e", turn("incorrect")) for _ in range(3)],
        trajectory("f", turn("no_kernel")),
    ]
    picked = {e.why: (e.trajectory.task, e.turns) for e in pick_examples(found)}
    assert picked == {
        "Fastest": ("a", (0,)),
        "Fastest of another task": ("b", (0,)),
        "Largest gain from feedback": ("c", (0, 1)),
        "Typical of the correct": ("d", (0,)),
        "Failed: incorrect (3 of 12 turns)": ("e", (0,)),
        "Failed: no kernel (1 of 12 turns)": ("f", (0,)),
    }
    assert pick_examples([]) == []


@pytest.mark.parametrize(
    ("made", "said", "next_phase"),
    [
        (
            (),
            ["config.json is missing", "No held-out evaluation", "library is empty", "No kernels"],
            "Corpus",
        ),
        (
            (make_config,),
            ["Joint RL has not begun", "cold start has not begun", "library is empty"],
            "Corpus",
        ),
        (
            (make_config, lambda w: make_metrics(w, sft=120, rl=0)),
            ["120 of 300 steps", "Joint RL has not begun"],
            "Cold start",
        ),
        (
            (make_config, lambda w: make_metrics(w, rl=7), lambda w: make_evaluation(w, "eval_sft", 0.3)),
            ["7 of 40 steps", "From held-out tasks before RL"],
            "Joint RL",
        ),
    ],
    ids=["empty", "config only", "in the cold start", "in RL"],
)
def test_an_unfinished_run_has_a_report_that_says_what_is_missing(tmp_path, made, said, next_phase):
    for make in made:
        make(tmp_path)
    text = re.sub(r"\s+", " ", Page(write_report(tmp_path)).text)
    for words in said:
        assert words in text
    assert f"not finished: {next_phase} comes next" in text


def test_kernels_come_from_the_newest_rollouts(finished):
    (finished / "rollouts" / "eval_rl.jsonl").unlink()
    for step, task in [(100, "new"), *((step, "old") for step in (9, 99, 10, 11, 90, 1, 2))]:
        selection = Trajectory(agent="selection", task="other", group="other")
        path = finished / "rollouts" / f"step_{step:05d}.jsonl"
        save_trajectories(path, [selection, trajectory(task, turn("ok", 1.5))])
    contents = load(finished, resamples=2)
    assert contents.kernels_from == "RL step 100"
    assert [t.task for t in contents.kernels] == ["new"], "other agents write no kernels"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("eval_sft.json", '{"last_turn": {}}'),
        ("eval_rl.json", "\x00"),
        ("metrics.jsonl", '{"phase": "rl", "reward": 1}\n'),
        ("metrics.jsonl", '{"phase": "rl", "step": 1, "reward": "high"}\n'),
        ("metrics.jsonl", "[1]\n"),
        ("rollouts/eval_rl.jsonl", '{"agent": "policy"}\n'),
        ("library.sqlite", "this is no database, and it is long enough to look like a page of one" * 20),
    ],
)
def test_a_damaged_file_is_named_and_the_old_report_stays(finished, name, content):
    (finished / "report.html").write_text("the report of yesterday")
    (finished / name).write_text(content)
    with pytest.raises(ReportError, match=re.escape(str(finished / name))):
        write_report(finished)
    assert (finished / "report.html").read_text() == "the report of yesterday"


def test_a_long_run_gives_a_small_page(tmp_path):
    make_config(tmp_path)
    make_metrics(tmp_path, sft=3000, rl=2000)
    assert write_report(tmp_path).stat().st_size < 600_000


def test_tasks_are_known_whatever_they_are_read_from(tmp_path):
    reference = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x + 1\n\n"
    reference += "def get_inputs():\n    return [torch.randn(2)]\n\ndef get_init_inputs():\n    return []\n"
    (tmp_path / "files" / "rows").mkdir(parents=True)
    (tmp_path / "files" / "rows" / "add.py").write_text(reference)
    options = demo().tasks.to_dict() | {"directory": str(tmp_path / "files"), "levels": (), "size": "gpu"}
    assert {task.family for task in contents_module._tasks({"tasks": options | {"source": "learnable"}}).values()} >= {"online_long_rows"}
    assert contents_module._tasks({"tasks": options}).keys() == {task.name for task in builtin_suite("gpu")}
    [task] = contents_module._tasks({"tasks": options | {"source": "modules"}}).values()
    assert task.reference.strip() == reference.strip()
    for gone in ({"source": "kernelbench"}, {"source": "records"}, {"source": "modules", "directory": str(tmp_path / "rows")}):
        assert contents_module._tasks({"tasks": options | gone}) == {}
    assert contents_module._tasks(None) == {}
