"""The file of a teacher's samples, and scripts/teacher.py."""

from __future__ import annotations

import collections
import dataclasses
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from configs.smollm2_triton import get_config
from dk_jax.interop.endpoint import Answer
from dk_jax.rollout.trajectory import Trajectory, Turn
from dk_jax.sft.samples import Sample
from dk_jax.sft.teacher import TeacherConfig
from dk_jax.sft.teacher_samples import (
    Provenance,
    TaughtSample,
    load_samples,
    load_taught,
    save_samples,
)
from dk_jax.sft.teacher_speaker import EndpointSpeaker, Exchange
from dk_jax.train import setup
from tests.dk_jax.fake_endpoint import FakeEndpoint, Reply, chat
from tests.dk_jax.test_teacher import KEY, TASKS, ScriptedClient, _key, answers, config, kind_of, lines, message, teach, teacher_of, whole  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


# --- the file -----------------------------------------------------------------------------------------------------------------------------


def test_samples_come_back_with_their_provenance(tmp_path):
    path = tmp_path / "samples.jsonl"
    with FakeEndpoint(answers()) as fake:
        teacher = teacher_of(fake, ScriptedClient(), tmp_path, config(round_tasks=1), price_in=1.0, price_out=2.0)
        samples, taught = teach(teacher), teacher.samples()
        host = f"127.0.0.1:{fake.base_url.split(':')[2].split('/')[0]}"
    save_samples(path, taught)
    assert load_taught(path) == taught and load_samples(path) == samples
    by_kind = {one.sample.kind: one.provenance for one in taught}
    where = by_kind["policy_with_skill"]
    assert (where.source, where.host, where.model, where.estimated) == ("teacher", host, "big", False)
    assert where.skills and where.outcomes == ("ok", "ok") and where.speedups == (1.5, 2.0)
    assert where.cost == pytest.approx(2 * (100 + 2 * 20) / 1e6) and re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:]+\+00:00", where.date)
    assert "advantage" in by_kind["selection"].note
    assert not path.with_suffix(".part").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not a sample"),
        ('{"kind": "policy", "task": "t", "turns": [["p", "a", true]]}', "field 'agent' is missing"),
        ('{"agent": "critic", "kind": "policy", "task": "t", "turns": [["p", "a", true]]}', "field 'agent' is 'critic'"),
        ('{"agent": "policy", "kind": "policy", "task": "t", "turns": []}', "field 'turns'"),
        ('{"agent": "policy", "kind": "policy", "task": "t", "turns": [["p", "a", 1]]}', "not .prompt, answer, imitated"),
        ('{"agent": "policy", "kind": "policy", "task": "t", "turns": [["p", "a", true]], "provenance": {"x": 1}}', "not a sample"),
    ],
)
def test_a_line_that_is_no_sample_is_named(tmp_path, line, said):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"agent": "policy", "kind": "policy", "task": "t", "turns": [["p", "a", true]]}\n')
    assert load_taught(path) == [TaughtSample(sample=Sample(agent="policy", kind="policy", task="t", turns=(("p", "a", True),)), provenance=None)]
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=rf"samples\.jsonl:2: .*{said}"):
        load_samples(path)


def test_the_key_is_in_no_file(tmp_path):
    with FakeEndpoint(lambda body, number: chat(f"{message('ok 1.0')}\n{KEY}")) as fake:
        teacher = teacher_of(fake, ScriptedClient(), tmp_path, config(form_="message", turns=1))
        teach(teacher, TASKS[:2])
    save_samples(tmp_path / "samples.jsonl", teacher.samples())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3 and all(path.stat().st_size for path in files)
    assert not [path for path in files if KEY in path.read_text()]
    assert fake.keys == [f"Bearer {KEY}"] * 2


def test_a_style_that_only_small_models_read_is_refused():
    with pytest.raises(ValueError, match="'compact'.*prompts of style 'chat'"):
        config(style="compact")


def test_a_speaker_has_what_episodes_ask_of_one(tmp_path):
    with FakeEndpoint(lambda body, number: chat("<think>long</think> short")) as fake:
        with teacher_of(fake, ScriptedClient(), tmp_path).endpoint as endpoint:
            speaker = EndpointSpeaker(endpoint=endpoint, max_tokens=10, max_context_tokens=100)
            talk, call = Trajectory(agent="policy", task="t", group="t"), Trajectory(agent="selection", task="t", group="t")
            assert speaker.fits("word " * 50, 20) and not speaker.fits("word " * 50, 60)
            assert speaker.speak([talk, call], ["hello", "word " * 200], [0, 0], max_new=20) == [True, False]
            assert [turn.text for turn in talk.turns] == ["<think>long</think> short"] and call.turns == [Turn(text="", stop="context")]
            assert speaker.speak([talk], ["again"], [0], max_new=20) == [True]
    assert [m["content"] for m in fake.asked[1]["messages"]] == ["hello", "short", "again"], "reasoning is not told again"


# --- the command --------------------------------------------------------------------------------------------------------------------------


DRIVER = """
import runpy, sys
sys.path.insert(0, {root!r})
from dk_jax.train import setup
from tests.dk_jax.test_teacher import ScriptedClient, judge_of
setup.make_judge = lambda cfg, socket, journal: judge_of(ScriptedClient(), journal.path)
sys.argv = [{script!r}, *sys.argv[1:]]
runpy.run_path({script!r}, run_name="__main__")
"""


def test_the_command_keeps_all_when_it_is_interrupted(tmp_path, monkeypatch):
    workdir, started = tmp_path / "run", []
    listening = socket.socket(socket.AF_UNIX)
    monkeypatch.chdir(tmp_path)
    listening.bind("s.sock")

    def respond(body, number):
        if number == 4:
            started[0].send_signal(signal.SIGINT)
            return Reply(hangs=True)
        return whole(body)

    with FakeEndpoint(respond) as fake:
        command = [
            sys.executable, "-c", DRIVER.format(root=str(ROOT), script=str(ROOT / "scripts/teacher.py")),
            f"--config={ROOT}/configs/smollm2_triton.py", "--config.tasks.generated=0", f"--workdir={workdir}",
            f"--base_url={fake.base_url}", "--model=big", "--api_key_env=TEST_KEY", "--tasks=2", "--samples=1", "--summaries=1", "--parallel=1",
            "--price_in=1", "--price_out=2", "--sandbox=s.sock", "--config.rollout.max_context_tokens=8000",
        ]  # fmt: skip
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        out, err = started[0].communicate(timeout=120)
        listening.close()
        assert started[0].returncode == 130 and "the same command goes on" in err, out + err
        assert "kept      policy 2;" in out and "2 samples ->" in out and "5 requests, 4 answered" in out and "cost      0.0006" in out
        assert lines(workdir, "journal_teacher_answers.jsonl") == lines(workdir, "journal_teacher.jsonl") == 4
        assert {s.kind for s in load_samples(workdir / "teacher_samples.jsonl")} == {"policy"}
        assert not [path for path in workdir.rglob("*") if path.is_file() and KEY in path.read_text(errors="replace")]

        fake.respond = lambda body, number: whole(body)
        cfg = get_config()
        rollout = dataclasses.replace(setup.rollout_config(cfg), rollouts=1, summaries=1, max_context_tokens=8000)
        for name in ("answers", "verdicts"):
            (workdir / f"journal_teacher{'_answers' * (name == 'answers')}.jsonl").rename(workdir / f"{name}.jsonl")
        teacher = teacher_of(fake, ScriptedClient(dies_at=0), workdir, TeacherConfig(rollout=rollout, max_tokens=8192))
        samples = teach(teacher, setup.load_tasks(cfg).train[:2])
    assert collections.Counter(s.kind for s in samples) == {"policy": 2, "summary": 2}
    assert [kind_of(body) for body in fake.asked[4:]] == ["summary"] * 3, "only the question that was not answered is asked again"


def test_provenance_without_prices_has_no_cost():
    said = [Exchange(prompt="p", shown="a", answer=Answer(key="k", model="m", prompt_tokens=1, estimated=i == 1)) for i in range(2)]
    where = Provenance.of("h", said)
    assert where.cost is None and where.prompt_tokens == 2 and where.estimated
