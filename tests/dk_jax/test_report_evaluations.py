"""Reports of evaluations: what is known of them stands in the page, of one or of several, of whole ones and of what a crash left."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.demo import get_config
from dk_jax.agents.policy import render_feedback, render_first
from dk_jax.evaluation import harness, report_search
from dk_jax.evaluation.evaluated import read_evaluation
from dk_jax.evaluation.report import ReportError, write_comparison
from dk_jax.evaluation.results import RESULTS, Result, ResultsFile
from dk_jax.rollout.episode import task_view
from dk_jax.tasks.builtin import builtin_suite
from dk_jax.train import setup
from tests.dk_jax.report_material import (
    GOOD,
    PLAIN,
    Page,
    few_draws,  # noqa: F401
    make_config,
    make_evaluation,
    make_metrics,
    trajectory,
    turn,
)

pytestmark = pytest.mark.usefixtures("few_draws")
ROOT = Path(__file__).resolve().parents[2]
TASKS = builtin_suite("cpu").held_out[:4]


def evaluation(folder: Path, *samples, tasks=TASKS, policy="model", turns=2, baselines=("eager",)) -> Path:
    """A folder as scripts/evaluate.py leaves it, with these trajectories."""
    cfg = get_config()
    cfg.sandbox.baselines = baselines
    plan = harness.Plan(tasks=tuple(tasks), samples=2, turns=turns, chunk=2, seed=0, config=setup.rollout_config(cfg))
    folder.mkdir(parents=True)
    harness.remember_settings(folder, harness.settings_of(cfg, plan, policy={"policy": policy}, split="held_out", library={}))
    level = {task.name: task.level for task in tasks}
    results = (Result(trajectory=t, level=level[t.task], family="", split="held_out") for t in samples)
    ResultsFile(folder / RESULTS).append(results)
    return folder


def whole(folder: Path, speedup: float, **fields) -> Path:
    """Every sample fails first and then is right and so many times as fast as eager."""
    turns = (turn("incorrect", source=PLAIN), turn("ok", speedup, GOOD))
    return evaluation(folder, *(trajectory(task.name, *turns, member=m) for task in TASKS for m in range(2)), **fields)


def report_of(*paths: Path, **fields) -> Page:
    return Page(write_comparison(paths, paths[0].parent / "page.html", **fields))


def flat(page: Page) -> str:
    return re.sub(r"\s+", " ", page.text)


# --- what stands in it ----------------------------------------------------------------------------------------------------------------


def test_the_headline_of_one_evaluation_is_what_its_kernels_are(tmp_path):
    text = flat(report_of(whole(tmp_path / "a", 1.6)))
    everything = "100.0 % 100.0 – 100.0"
    nothing = "0.0 % 0.0 – 0.0"
    row = f"last turn 4, 8 {everything} {everything} {everything} {everything} {everything} {nothing} 1.60 × 1.60 – 1.60 1.60 × 1.60 – 1.60"
    assert row in text, "compiled, correct, faster than 1, 1.2 and 1.5, not than 2"
    assert "Evaluation of model: 8 of 8 samples over 4 tasks (held_out)" in text
    assert "Turn 1 Turn 2 a 0 % (0 % to 0 %) 100 % (100 % to 100 %)" in text, "the first turns are wrong, the second right"


def test_the_second_evaluation_is_told_by_how_much_it_differs_from_the_first(tmp_path):
    page = report_of(whole(tmp_path / "slow", 0.5), whole(tmp_path / "fast", 1.5))
    text = flat(page)
    found = re.search(r"fast last turn, 4 tasks (\S+) \S+ to \S+ (\S+) \S+ to \S+ (\S+) \S+ to \S+ (\S+) ", text)
    assert found.groups() == ("+0.0", "+100.0", "+0.0", "+1.00"), "correct, Fast 1, Fast 1.5 (1.5 is not above it), geometric mean"
    assert {"gain"} == {value for name, value in page.attributes if name == "class" and value in ("n gain", "n loss") for value in value.split()[1:]}
    assert "fast against slow" in page.source


def test_folders_of_the_same_name_are_told_apart_and_different_tasks_are_said(tmp_path):
    other = evaluation(tmp_path / "y/eval", trajectory(TASKS[0].name, turn("ok", 2.0)), tasks=TASKS[:1])
    text = flat(report_of(whole(tmp_path / "x/eval", 1.5), other))
    assert "x/eval / y/eval" in text and "They cover different tasks (4, 1)" in text
    assert "y/eval last turn, 1 tasks" in text


def test_each_baseline_has_its_table(tmp_path):
    right = [trajectory(task.name, turn("ok", 2.0), member=m) for task in TASKS for m in range(2)]
    for t in right:
        t.turns[0].verdict = dataclasses.replace(t.turns[0].verdict, speedups={"eager": 2.0, "torch.compile": 0.8})
    text = flat(report_of(evaluation(tmp_path / "a", *right, turns=1, baselines=("eager", "torch.compile"))))
    assert "0.80 × 0.80 – 0.80" in text.split("Over torch.compile")[1] and "2.00 × 2.00 – 2.00" in text.split("Over eager")[1]
    assert "a: eager and torch.compile" in Page(tmp_path / "page.html").source


def test_what_fired_and_what_does_not_count_is_counted(tmp_path):
    cheat = trajectory(TASKS[0].name, turn("ok", 3.0))
    cheat.turns[0].verdict = dataclasses.replace(cheat.turns[0].verdict, findings=("no_own_kernel",), speed_rewarded=False)
    text = flat(report_of(evaluation(tmp_path / "a", cheat, trajectory(TASKS[1].name, turn("no_kernel")), turns=1)))
    assert "no_own_kernel 1" in text and "Correct, but the speed is not their own 1" in text
    assert "Samples without a kernel 1" in text


def test_equal_budgets_schemes_and_a_growing_library_are_shown_where_an_evaluation_has_them(tmp_path):
    own = read_evaluation(whole(tmp_path / "a", 1.6), resamples=7)
    text = flat(Page(report_search.scaling([own])))
    assert "a: equal budgets of k candidates" in text
    assert re.search(r"serial, 1 × 2 2 100\.0 % 100\.0 – 100\.0 100\.0 % 100\.0 – 100\.0 1\.60 × 1\.60 – 1\.60 2\.0 – parallel, 2 × 1 2 0\.0 %", text)
    assert report_search.schemes([own]) == report_search.growth([own]) == ""
    scores = own.summary["scores"]["last_turn"]["eager"]["all"]
    group = {"samples": 4, "candidates": 6, "went_on": 2, "first_turn": scores, "best_turn": scores}
    grown = {"offered": 3, "steps": [{"proposed": 2, "accepted": 1, "active": 4}, {"proposed": 5, "accepted": 2, "active": 5}]}
    searched = dataclasses.replace(own, summary=own.summary | {"schemes": {"eager": {"null": group, "chosen": group}}, "growth": grown})
    assert re.search(r"null first turn 4, 2 100\.0 % .*? chosen best turn 4, 2 100\.0 %", flat(Page(report_search.schemes([searched]))))
    assert "chunk of tasks 2: proposed 5, accepted 2, active 5" in report_search.growth([searched])


def test_skills_in_prompts_stand_beside_samples_without(tmp_path):
    with_ = [trajectory(TASKS[0].name, turn("ok", 2.0), member=m, skills=("tile<rows>",)) for m in range(2)]
    page = report_of(evaluation(tmp_path / "a", *with_, trajectory(TASKS[1].name, turn("incorrect")), turns=1))
    assert re.search(r"tile<rows> 1, 2 100\.0 % .*? no skill 1, 1 0\.0 %", flat(page))


def test_published_figures_are_marked_and_kernelbench_is_told_from_other_tasks(tmp_path):
    page = report_of(whole(tmp_path / "a", 1.5))
    assert "These are not the tasks of KernelBench" in flat(page) and "arXiv 2606.16497" in flat(page)
    assert "daVinci-kernel 14B: 37 %, as published" in page.source and 'fill="url(#published-' in page.source
    tasks = [dataclasses.replace(task, name=f"level1_{i}_Op") for i, task in enumerate(TASKS)]
    bench = evaluation(tmp_path / "b", *(trajectory(t.name, turn("ok", 2.0)) for t in tasks), tasks=tasks, turns=1)
    assert "not the tasks of KernelBench" not in flat(report_of(bench))


# --- rollouts -------------------------------------------------------------------------------------------------------------------------


def test_every_rollout_can_be_chosen_with_what_changed_and_what_was_judged(tmp_path):
    page = report_of(whole(tmp_path / "a", 1.6))
    assert sorted((row[2], row[3]) for row, _ in page.rollouts) == sorted(
        (task.name, f"sample {m}, 2 turns") for task in TASKS for m in range(2)
    )
    row, html = page.rollouts[0]
    text = flat(Page(html))
    assert row[4:] == ["ok", 1.6] and "Turn 1 of 2" in text and "wrong result: 1048576" in text and "1.60 × eager" in text
    assert "What changed: lines removed (−) 1, added (+) 8" in text and "+ #pragma omp parallel for" in text


def test_an_evaluations_prompts_are_rendered_again_from_tasks_of_just_that_content(tmp_path):
    known = whole(tmp_path / "a", 1.6)
    page = report_of(known)
    row, html = next((row, html) for row, html in page.rollouts if row[2] == TASKS[0].name)
    view = task_view(TASKS[0], language="cpp", form="kernel")
    asked = [page.piece(int(number)) for number in re.findall(r'data-piece="(\d+)"', html)]
    verdict = turn("incorrect", source=PLAIN).verdict
    assert [Page(text).text.strip() for text in asked] == [
        render_first(view, style="compact").strip(), render_feedback(verdict, view, style="compact").strip()
    ]  # fmt: skip
    settings = json.loads((known / "settings.json").read_text())
    settings["tasks"][TASKS[0].name] = "0" * 16
    (known / "settings.json").write_text(json.dumps(settings))
    html = next(html for row, html in report_of(known).rollouts if row[2] == TASKS[0].name)
    assert "data-piece" not in html and "the text of this task is not known here" in html


def test_prompts_with_skills_or_of_a_silent_policy_are_said_to_be_missing(tmp_path):
    skilled = evaluation(tmp_path / "a", trajectory(TASKS[0].name, turn("ok", 2.0), skills=("tiles",)), turns=1)
    assert "nor the text of the skills" in report_of(skilled).rollouts[0][1]
    assert "This policy reads no prompts" in report_of(whole(tmp_path / "b", 2.0, policy="expert")).rollouts[0][1]


def test_a_page_carries_as_many_rollouts_as_asked_for_the_best_first_and_says_what_it_leaves_out(tmp_path):
    samples = [trajectory(task.name, turn("ok", 1.0 + m), member=m) for task in TASKS for m in range(2)]
    folder = evaluation(tmp_path / "a", *samples, turns=1)
    best = report_of(folder, amount="best")
    assert [(row[2], row[3]) for row, _ in best.rollouts] == [(task.name, "sample 1, 1 turn") for task in TASKS]
    assert "4 rollouts are in this page; 4 more are left out: --rollouts=best" in flat(best)
    few = report_of(folder, amount=5)
    assert len(few.rollouts) == 5 and "3 more are left out" in flat(few)
    full = report_of(folder, max_bytes=4000)
    assert 0 < len(full.rollouts) < 8 and re.search(r"more are left out: the page is full at 0 MB \(--max_mb\)", flat(full))
    assert sum(len(found) for found in re.findall(r'id="piece-\d+">(.*?)</script>', full.source)) <= 4000


# --- what a crash or a hostile model left ---------------------------------------------------------------------------------------------


def test_a_part_of_an_evaluation_is_shown_and_said_to_be_one(tmp_path):
    folder = evaluation(tmp_path / "a", trajectory(TASKS[0].name, turn("ok", 2.0)))
    with open(folder / RESULTS, "a") as file:
        file.write('{"task": "cut sho')
    text = flat(report_of(folder))
    assert "not finished: 1 of 8 samples are there, 4 tasks are incomplete" in text
    assert "the last line of results.jsonl was cut short" in text and "last turn 1, 1" in text


def test_an_evaluation_without_any_sample_yet_has_a_page(tmp_path):
    text = flat(report_of(evaluation(tmp_path / "a")))
    assert "No sample has been judged yet" in text and "No rollouts have been kept yet" in text
    assert "not finished: 0 of 8 samples" in flat(report_of(tmp_path / "a", whole(tmp_path / "b", 2.0)))


@pytest.mark.parametrize(
    ("name", "content"), [("settings.json", "{"), ("results.jsonl", "{}\n"), ("sessions.json", "["), ("admission.jsonl", "\x00\n")]
)
def test_a_damaged_file_is_named_and_the_old_page_stays(tmp_path, name, content):
    folder, page = whole(tmp_path / "a", 2.0), tmp_path / "page.html"
    page.write_text("yesterday's")
    (folder / name).write_text(content)
    with pytest.raises(ReportError, match=re.escape(str(folder / name))):
        write_comparison([folder], page)
    assert page.read_text() == "yesterday's"


def test_other_folders_the_same_twice_and_too_many_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    folder = whole(tmp_path / "a", 2.0)
    for paths, said in (
        ([tmp_path / "empty"], "holds neither a run .* nor an evaluation"), ([folder, folder], "1 to 8 different folders"),
        ([tmp_path / str(i) for i in range(9)], "1 to 8 different folders"), ([], "1 to 8 different folders"),
    ):  # fmt: skip
        with pytest.raises(ReportError, match=said):
            write_comparison(paths, tmp_path / "page.html")


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'`</pre>\u202egpj.exe\u2066\x00\x1b[31m\u200b"


def test_nothing_that_a_model_wrote_is_markup_or_turns_the_writing_around(tmp_path):
    huge = HOSTILE + "x" * 3_000_000
    t = trajectory(TASKS[0].name, turn("ok", 2.0, HOSTILE), turn("ok", 2.0, huge), skills=(HOSTILE,))
    t.turns[1].stop = t.turns[0].error = HOSTILE
    for own in t.turns:
        own.verdict = dataclasses.replace(own.verdict, feedback=huge, profile=HOSTILE, findings=(HOSTILE,), speedups={"eager": 2.0, HOSTILE: 1.0})
    wrong = trajectory(TASKS[1].name, turn("no_kernel", source=huge))
    page = report_of(evaluation(tmp_path / "a", t, wrong))
    assert page.tags.count("script") == 1 + 1 + len(re.findall(r'id="piece-', page.source))
    for source in (page.source, *(html for _, html in page.rollouts)):
        found = Page(source)
        assert not {"img", "iframe"} & set(found.tags) and not [name for name, _ in found.attributes if name.startswith("on")]
        assert not set("\u202e\u2066\x00\x1b\u200b") & set(source), "they are named, not obeyed"
        assert "U+202E" in source and len(source) < 600_000
    assert all("script" not in Page(html).tags for _, html in page.rollouts)


def test_the_page_may_run_its_own_script_and_nothing_else(tmp_path):
    page = report_of(whole(tmp_path / "a", 2.0))
    policy = next(value for name, value in page.attributes if name == "content" and "default-src" in value)
    script = re.search(r"<script>(.*?)</script>", page.source, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and f"script-src 'sha256-{digest}'" in policy and "unsafe-eval" not in policy
    assert not re.search(r"https?:|fetch\(|XMLHttp|import\(|url\((?!#published)", page.source)


# --- runs and commands ----------------------------------------------------------------------------------------------------------------


def test_a_run_is_compared_by_its_last_evaluation(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    make_config(run)
    make_metrics(run, rl=12)
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    make_config(fresh)
    make_evaluation(run, "eval_sft", 0.5)
    text = flat(report_of(whole(tmp_path / "a", 2.0), run, fresh))
    assert "run (before RL) last turn" in text and "fresh: a run without a held-out evaluation yet" in text
    assert "How the runs were made" in text and "Active skills" in Page(tmp_path / "page.html").source
    assert {row[1] for row, _ in Page(tmp_path / "page.html").rollouts} == {0, 1}, "the evaluation's rollouts and the run's"


def test_a_runs_prompts_are_read_back_from_its_tokens(tmp_path):
    from dk_jax.generation.tokenizer import train_codec

    run = tmp_path / "run"
    run.mkdir()
    make_config(run)
    make_evaluation(run, "eval_rl", 0.5)
    codec = train_codec(["write a kernel", "ok 1.25", GOOD], vocab_size=300)
    codec.save(run / "codec")
    (run / "codec" / "done").touch()
    path = run / "rollouts" / "eval_rl.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    tokens, index = [], []
    for number, (prompt, answer) in enumerate((("write a kernel", GOOD), ("ok 1.25", GOOD))):
        for text, at in ((prompt, -1), (answer, number)):
            encoded = list(codec.encode(text))
            tokens += encoded
            index += [at] * len(encoded)
    line |= {"tokens": tokens, "turn_index": index, "logp_sample": [0.0] * len(tokens)}
    path.write_text(json.dumps(line) + "\n")
    page = report_of(run)
    asked = [Page(page.piece(int(number))).text.strip() for number in re.findall(r'data-piece="(\d+)"', page.rollouts[0][1])]
    assert asked == ["write a kernel", "ok 1.25"]


def test_the_command_writes_the_page_and_says_what_is_wrong_in_one_line(tmp_path):
    folder = whole(tmp_path / "a", 2.0)

    def command(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, ROOT / "scripts/report.py", *arguments], capture_output=True, text=True, timeout=300)

    done = command(str(folder), "--rollouts=2", f"--output={tmp_path / 'one.html'}")
    assert done.returncode == 0 and f"report: {tmp_path / 'one.html'}" in done.stdout, done.stderr
    assert len(Page(tmp_path / "one.html").rollouts) == 2
    failed = command(str(folder), "--rollouts=some")
    assert failed.returncode == 1 and failed.stderr.strip().splitlines()[-1] == "error: --rollouts=some: it is all, best or a number"


def test_the_numbers_are_those_of_the_evaluations_own_summary(tmp_path):
    folder = whole(tmp_path / "a", 1.6)
    assert read_evaluation(folder, resamples=7).summary == harness.summary_of(folder, resamples=7)
