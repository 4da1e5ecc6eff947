"""What reports are made from in tests: runs and evaluations that left files, and a page that is checked as it is read."""

from __future__ import annotations

import base64
import gzip
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from configs.demo import get_config
from dk_jax.evaluation import report, report_compare, report_facts, report_fast_p
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
            "fast": {str(p): share(s > p for s in speedups) for p in (1.0, 1.2, 1.5, 2.0)},
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


class Page(HTMLParser):
    """Checks that tags nest, and gathers text, tags and attributes; `rollouts` are what its script would unpack."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, source: Path | str):
        super().__init__()
        self.text, self.tags, self.attributes, self._open = "", [], [], []
        self.source = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
        self.feed(self.source)
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
        if not self._open or self._open[-1] not in ("style", "title", "script", "desc"):
            self.text += f" {data}"

    def section(self, title: str) -> str:
        return re.sub(r"\s+", " ", self.text).split(title, 1)[1]

    @property
    def rollouts(self) -> list[tuple[list, str]]:
        """The chooser's rows, each with its rollout's markup."""
        rows = json.loads(re.search(r'id="rollout-index">(.*?)</script>', self.source).group(1))["rows"]
        return [(row, self.piece(row[0])) for row in rows]

    def piece(self, number: int) -> str:
        packed = re.search(rf'id="piece-{number}">(.*?)</script>', self.source).group(1)
        return gzip.decompress(base64.b64decode(packed)).decode("utf-8")


@pytest.fixture
def few_draws(monkeypatch):
    """Intervals are no subject here: few draws make pages fast."""
    for module, name in (
        (report, "RESAMPLES"), (report, "RUN_RESAMPLES"), (report_compare, "RESAMPLES"), (report_facts, "RESAMPLES"),
        (report_fast_p, "CURVE_RESAMPLES"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, 10)
