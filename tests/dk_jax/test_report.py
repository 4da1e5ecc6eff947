"""The report tells what a run did, says what is missing, names what is damaged and needs nothing else."""

import dataclasses
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from configs.demo import get_config
from dk_jax.evaluation.contents import load
from dk_jax.evaluation.examples import pick_examples
from dk_jax.evaluation.report import ReportError, write_report
from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict, save_trajectories
from dk_jax.skills.library import SkillLibrary
from dk_jax.skills.record import Evidence, Provenance, SkillDraft
from dk_jax.tasks.builtin import builtin_suite

GOOD = """extern "C" void kernel(const float* x, const float* y, float* out) {
  #pragma omp parallel for
  for (long i = 0; i < x_d0; ++i) {
    const float* a = x + i * x_d1;
    const float* b = y + i * x_d1;
    float* o = out + i * x_d1;
    #pragma omp simd
    for (long j = 0; j < x_d1; ++j) o[j] = a[j] * b[j] + 0.5f;
  }
}"""
PLAIN = """extern "C" void kernel(const float* x, const float* y, float* out) {
  for (long i = 0; i < out_n; ++i) out[i] = x[i] * y[i] + 0.5f;
}"""
NASTY = '<script>alert("x")</script> & </pre></body>'
SKILLS = (
    ("simd_inner_loop", "Mark the inner loop with omp simd so that it is vectorised", 1.62, True),
    ("parallel_rows", "Share rows among threads when each row is independent", 1.48, True),
    ("hoist_reciprocal", "Divide once a row and multiply in the loop", 1.06, False),
    ("two_pass_softmax", "Find maximum and sum in one pass <b>over</b> the row", 1.21, True),
)


def verdict(outcome: str, speedup: float = 0.0) -> Verdict:
    texts = {
        "ok": f"correct; {speedup:.2f}x faster than eager (0.214 ms vs {0.214 * speedup:.3g} ms)",
        "incorrect": "wrong result: 1048576 of 1048576 values differ, worst 3.1 at [0, 17] (trial 1 of 2)",
        "build_failed": "does not compile:\n> kernel.cpp:3:12: error: 'b' was not declared in this scope",
        "no_kernel": "no kernel found: the message was cut at 200 tokens",
    }
    return Verdict(
        outcome=outcome,
        stage={"ok": "timed", "incorrect": "loaded"}.get(outcome, "queued"),
        reward=0.5 + 0.5 * min(speedup, 6.0) if outcome == "ok" else 0.0,
        speedup=speedup,
        noisy=0.95 < speedup < 1.05,
        coverage=None,
        feedback=texts[outcome],
    )


def turn(outcome: str, speedup: float = 0.0, source: str = PLAIN) -> Turn:
    read = None if outcome == "no_kernel" else source
    return Turn(text=f"say {source}", stop="eos", source=read, verdict=verdict(outcome, speedup))


def trajectory(task: str, *turns: Turn, member: int = 0, skills: tuple[str, ...] = ()) -> Trajectory:
    return Trajectory(agent="policy", task=task, group=task, member=member, turns=list(turns), skills=skills)


def rollouts(skill: float, seed: int, samples: int = 4) -> list[Trajectory]:
    """Trajectories over the held-out tasks as a policy of a skill in [0, 1] might write them."""
    rng = random.Random(seed)
    names = [task.name for task in builtin_suite("cpu").held_out if task.level < 3]

    def one() -> Turn:
        if rng.random() < 0.25 + 0.55 * skill:
            speedup = math.exp(rng.gauss(-0.3 + 0.9 * skill, 0.6))
            return turn("ok", speedup, GOOD if speedup > 1.3 else PLAIN)
        return turn(rng.choice(["incorrect", "incorrect", "build_failed", "no_kernel"]))

    return [
        trajectory(name, one(), one(), member=m, skills=("simd_inner_loop",) if rng.random() < skill else ())
        for name in names
        for m in range(samples)
    ]


def scores(trajectories: list[Trajectory]) -> dict:
    """What heldout.save_scores writes, by a shorter road."""

    def of(turns: list[Turn]) -> dict:
        speedups = [t.verdict.speedup for t in turns]
        right = [s for s in speedups if s > 0]
        share = lambda flags: sum(flags) / len(turns)  # noqa: E731
        return {
            "samples": len(turns),
            "compiled": share(t.verdict.compiled for t in turns),
            "correct": share(t.verdict.correct for t in turns),
            "fast": {str(p): share(s >= p for s in speedups) for p in (1.0, 1.2, 1.5, 2.0)},
            "mean_speedup": sum(speedups) / len(turns),
            "geomean_correct": math.exp(sum(map(math.log, right)) / len(right)) if right else 0.0,
        }

    tasks = dict.fromkeys(t.task for t in trajectories)
    return {
        "last_turn": of([t.turns[-1] for t in trajectories]),
        "turns": [of([t.turns[u] for t in trajectories]) for u in range(2)],
        "tasks": {name: of([t.turns[-1] for t in trajectories if t.task == name]) for name in tasks},
    }


def make_config(workdir: Path) -> None:
    config = get_config()
    config.sft.steps, config.rl.steps = 300, 40
    (workdir / "config.json").write_text(json.dumps(config.to_dict()))


def make_metrics(workdir: Path, *, sft: int = 300, rl: int = 40) -> None:
    rng = random.Random(3)
    lines = [
        {
            "phase": "corpus",
            "step": 0,
            "kernels": 1146,
            "correct": 978,
            "tasks": 240,
            "ok": 978,
            "seconds": 171.0,
        }
    ]
    for step in range(1, sft + 1):
        lines.append(
            {"phase": "sft", "step": step, "loss": 4.6 * math.exp(-step / 60) + 0.42 + rng.gauss(0, 0.03)}
        )
    for step in range(1, rl + 1):
        grown = 1 - math.exp(-step / 18)
        lines.append(
            {
                "phase": "rl",
                "step": step,
                "reward": 0.7 + 0.9 * grown + rng.gauss(0, 0.12),
                "correct": min(0.42 + 0.36 * grown + rng.gauss(0, 0.05), 1.0),
                "speedup": max(0.5 + 1.0 * grown + rng.gauss(0, 0.12), 0),
                "fast_1.5": max(0.1 + 0.3 * grown + rng.gauss(0, 0.05), 0),
                "collect_s": rng.uniform(7, 12),
                "update_s": rng.uniform(2.5, 3.5),
                "entropy": 0.5 - 0.25 * grown + rng.gauss(0, 0.02),
                "skills_proposed": float(step // 2),
                "skills_verified": float(step // 6),
                "skills_active": float(step // 9),
            }
        )
    (workdir / "metrics.jsonl").write_text(
        "".join(json.dumps({"time": 0.0, **line}) + "\n" for line in lines)
    )


def make_evaluation(workdir: Path, phase: str, skill: float) -> None:
    found = rollouts(skill, seed=len(phase))
    save_trajectories(workdir / "rollouts" / f"{phase}.jsonl", found)
    (workdir / f"{phase}.json").write_text(json.dumps(scores(found)))


def make_library(workdir: Path) -> None:
    with SkillLibrary(workdir / "library.sqlite") as library:
        for i, (name, description, effect, good) in enumerate(SKILLS):
            content = f"Motivation: loops are slow.\nKey Idea: {description}.\nExample:\n{GOOD}"
            draft = SkillDraft(
                name=name,
                description=description,
                scope="general",
                tags=("loop", "simd", "cpu"),
                content=content,
            )
            step = 5 * i + 3
            skill = library.propose(draft, Provenance(task="gelu_tall", step=step), language="cpp")
            library.record_evidence(
                skill,
                Evidence(
                    step=step, tasks=("gelu_tall", "gelu_wide"), device="cpu", rule="sequential", n=16,
                    decision="accept" if good else "reject", p=0.03,
                    effect=effect, low=effect - 0.2, high=effect + 0.25,
                ),
            )  # fmt: skip
            if good:
                library.activate(skill)
                library.use(skill, shown=30, selected=12, log_effects=[math.log(1.3)] * 12)
            else:
                library.reject(skill, "no gain")
            library.commit(step)


@pytest.fixture
def finished(tmp_path) -> Path:
    """The workdir of a finished run."""
    make_config(tmp_path)
    make_metrics(tmp_path)
    make_evaluation(tmp_path, "eval_sft", 0.2)
    make_evaluation(tmp_path, "eval_rl", 0.9)
    make_library(tmp_path)
    return tmp_path


class _Page(HTMLParser):
    """Checks that tags nest, and gathers text, tags and attributes."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, path: Path):
        super().__init__()
        self.text, self.tags, self.attributes, self._open = "", [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open and self._open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if not self._open or self._open[-1] not in ("style", "title"):
            self.text += f" {data}"

    def section(self, title: str) -> str:
        return re.sub(r"\s+", " ", self.text).split(title, 1)[1]


def test_a_finished_run_has_every_section_and_needs_nothing_else(finished):
    path = write_report(finished)
    assert path == finished / "report.html"
    page = _Page(path)
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
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not [value for name, value in page.attributes if name in ("src", "href") or "://" in (value or "")]
    assert "@import" not in path.read_text() and "url(" not in path.read_text()
    assert list(finished.glob("*.part")) == []


def test_the_headline_shows_the_scores_of_both_evaluations_and_their_change(finished):
    before, after = (
        json.loads((finished / f"{name}.json").read_text())["last_turn"] for name in ("eval_sft", "eval_rl")
    )
    text = _Page(write_report(finished)).section("95 %")
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
    text = _Page(write_report(finished)).section("Mean speedup")
    assert "± 0.00" in text[:60], "every task gains exactly 0.5, however much the tasks differ"


def test_held_out_tasks_are_listed_with_their_level_worst_losses_included(finished):
    data = json.loads((finished / "eval_rl.json").read_text())
    data["tasks"]["rms_norm_wide"] |= {"mean_speedup": 0.01, "correct": 0.25}
    (finished / "eval_rl.json").write_text(json.dumps(data))
    before = json.loads((finished / "eval_sft.json").read_text())["tasks"]["rms_norm_wide"]
    text = _Page(write_report(finished)).section("Task by task")
    change = f"{0.01 - before['mean_speedup']:+.2f}".replace("-", "−")
    assert (
        f"rms_norm_wide 1 {100 * before['correct']:.0f} % 25 % {before['mean_speedup']:.2f} × 0.01 × {change}"
        in text
    )


def test_skills_are_listed_with_evidence_and_use_the_rejected_ones_last(finished):
    text = _Page(write_report(finished)).section("Task by task").split(" Skills ", 1)[1]
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
    page = _Page(write_report(finished))
    assert "script" not in page.tags
    assert page.text.count('alert("x")') == 5, (
        "source, feedback, skill, and the task in table and card are text"
    )
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
    text = re.sub(r"\s+", " ", _Page(write_report(tmp_path)).text)
    for words in said:
        assert words in text
    assert f"not finished: {next_phase} comes next" in text


def test_kernels_come_from_the_newest_rollouts(finished):
    (finished / "rollouts" / "eval_rl.jsonl").unlink()
    for step, task in [(100, "new"), *((step, "old") for step in (9, 99, 10, 11, 90, 1, 2))]:
        selection = Trajectory(agent="selection", task="other", group="other")
        path = finished / "rollouts" / f"step_{step:05d}.jsonl"
        save_trajectories(path, [selection, trajectory(task, turn("ok", 1.5))])
    contents = load(finished)
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
