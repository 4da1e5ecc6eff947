"""The cold start's further sources: open packages' kernels and a teacher's samples, by config; and what is refused before any work."""

from __future__ import annotations

import pytest

from configs.smollm2_triton import get_config
from dk_jax.rollout.trajectory import Verdict
from dk_jax.sft.judged import JudgedKernel
from dk_jax.sft.open_source.kernels import OpenKernel, Provenance, save_open_kernels
from dk_jax.sft.samples import Sample
from dk_jax.sft.teacher_samples import TaughtSample, save_samples
from dk_jax.tasks.task import Task
from dk_jax.train.checks import check_config
from dk_jax.train.cold_start import ColdStartData
from dk_jax.train.setup import ConfigError

REFERENCE = "class Model:\n    def forward(self, x):\n        return 2 * x"
KERNEL = "import triton\nclass ModelNew: ...  # doubles"
TAUGHT = Sample(agent="selection", kind="selection", task="taught", turns=(("which?", "that", True),))


@pytest.fixture
def cfg(tmp_path):
    verdict = Verdict(outcome="ok", stage="correct", reward=0.5, speedup=0.0, noisy=False, coverage=None, feedback="correct")
    task = Task(name="open_double", level=1, family="open_double", split="train", reference=REFERENCE, size="small")
    kernel = JudgedKernel(task=task.name, source=KERNEL, techniques=(), intent="good", verdict=verdict)
    where = Provenance(
        package="p", version="1", licence="MIT", copyright=("me",), notices=(), launcher="p:double", files=("p.py",), functions=("double",),
        own=(), configs=(),
    )  # fmt: skip
    save_open_kernels(tmp_path / "open.jsonl", [OpenKernel(task=task, kernel=kernel, provenance=where)])
    save_samples(tmp_path / "taught.jsonl", [TaughtSample(sample=TAUGHT, provenance=None)])
    c = get_config()
    c.corpus.update(dict(open_kernels=str(tmp_path / "open.jsonl"), teacher=str(tmp_path / "taught.jsonl")))
    return c


def test_both_are_among_the_samples_and_stay_what_they_were_when_the_run_began(cfg, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    data = ColdStartData(cfg, None, run / "corpus.jsonl")
    found = data.samples({}, [])
    assert found[-1] == TAUGHT and {s.agent for s in found[:-1]} == {"policy"} and {s.task for s in found[:-1]} == {"open_double"}
    [(prompt, answer, imitated)] = found[0].turns
    assert REFERENCE in prompt and KERNEL in answer and imitated
    for name in ("open.jsonl", "taught.jsonl"):
        (tmp_path / name).write_text("")
    assert data.samples({}, []) == found
    cfg.corpus.update(dict(open_kernels="", teacher=""))
    assert data.samples({}, []) == []


def test_files_that_are_not_there_or_of_another_kind_are_refused_at_once(cfg):
    check_config(cfg)
    for changes, said in (
        (lambda c: c.corpus.update(dict(teacher="/nowhere.jsonl")), r"corpus\.teacher is '/nowhere\.jsonl': there is no such file"),
        (lambda c: c.corpus.update(dict(open_kernels="/nowhere.jsonl")), r"scripts/open_kernels\.py writes one"),
        (lambda c: c.sandbox.update(dict(language="cpp")), "holds Triton modules, but sandbox.language='cpp'"),
    ):
        other = cfg.copy_and_resolve_references()
        changes(other)
        with pytest.raises(ConfigError, match=said):
            check_config(other)
