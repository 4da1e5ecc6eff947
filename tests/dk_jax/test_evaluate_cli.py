"""scripts/evaluate.py: what it prints and leaves, that it goes on where it was interrupted, and errors in one line.

The commands are run in processes forked from one that has imported what they need; a scripted client is in the sandbox's place.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dk_jax.fake_endpoint import FakeEndpoint
from tests.dk_jax.test_search_growth import answer

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("gelu_activation_wide", "gelu_activation_tall", "bias_gated_residual_silu")
DRIVER = """
import json, os, runpy, signal, sys, time, traceback
sys.path.insert(0, {root!r})
os.environ["JAX_PLATFORMS"] = "cpu"
from dk_jax.train import setup
from sandbox.client import SandboxUnavailable
from sandbox.protocol import Options
from tests.dk_jax import spoken_kernels
from tests.dk_jax import test_harness as scripted


class Client(scripted.KnowingClient):
    "Where it was to be killed, the process is interrupted instead, or the sandbox is gone."

    def evaluate(self, task, candidates, options=None, client_key=None, on_result=None):
        if len(self.judged) == self.kill_at:
            self.kill_at = None
            if gone:
                raise SandboxUnavailable("nobody answers at s.sock")
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return super().evaluate(task, candidates, options, client_key, on_result)


def judge(cfg, socket, journal):
    if "--policy=endpoint" in arguments:
        return spoken_kernels.believing_judge(spoken_kernels.BelievingClient(), journal)
    return scripted.SandboxJudge(
        client=Client(stop_at), device="cpu", language="cpp", form="kernel", options=Options(), verify_options=Options(), journal=journal,
        max_parallel=1,
    )


setup.make_judge = judge
codes = []
for i, (arguments, stop_at, gone) in enumerate(json.load(open("cases.json"))):
    child = os.fork()
    if not child:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{{i}}.{{name}}", os.O_WRONLY | os.O_CREAT), fd)
        sys.argv = [{script!r}, *arguments]
        code = 1
        try:
            runpy.run_path({script!r}, run_name="__main__")
        except SystemExit as done:
            code = done.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(code if isinstance(code, int) else 1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
json.dump(codes, open("codes.json", "w"))
"""


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def run(folder: Path, *cases: tuple[list[str], int | None, bool]) -> list[Done]:
    """Runs commands one after another: arguments, after how many verdicts each is interrupted, and whether by the sandbox's end."""
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-c", DRIVER.format(root=str(ROOT), script=str(ROOT / "scripts/evaluate.py"))],
        cwd=folder, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    codes = json.loads((folder / "codes.json").read_text())
    return [Done(code, (folder / f"{i}.out").read_text(), (folder / f"{i}.err").read_text()) for i, code in enumerate(codes)]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """All commands of these tests, by name, and the folder that they ran in."""
    folder = tmp_path_factory.mktemp("evaluate")
    listening, fake = socket.socket(socket.AF_UNIX), FakeEndpoint(answer)
    (folder / "empty").mkdir()

    def command(workdir, policy, *more):
        own = [f"--only={','.join(NAMES)}", "--config.evaluation.samples=2", "--config.evaluation.turns=1", "--chunk=1", "--resamples=50"]
        return [f"--config={ROOT}/configs/demo.py", f"--workdir={workdir}", f"--policy={policy}", "--sandbox=s.sock", *own, *more]

    cases = {
        "interrupted": (command("e", "expert"), 2, False),
        "gone": (command("e", "expert"), 0, True),
        "whole": (command("e", "expert"), None, False),
        "wrong": (command("w", "wrong", "--config.sandbox.baselines=('eager','torch.compile')"), None, False),
        "summary": (["--workdir=w", "--summary_only", "--against=e", "--resamples=50"], None, False),
        "settings": (command("e", "naive"), None, False),
        "policy": (command("x", "experts"), None, False),
        "only": (command("x", "expert", "--only=nothing"), None, False),
        "library": (command("x", "expert", "--library=skills"), None, False),
        "endpoint": (command("x", "endpoint"), None, False),
        "grows": (
            command(
                "g", "endpoint", "--config.style=chat", f"--base_url={fake.base_url}", "--model=m", "--api_key_env=", "--config.evaluation.turns=2",
                "--config.evaluation.samples=1", "--config.evaluation.search.name=memory", "--config.evaluation.search.grow=True",
                "--config.rollout.max_context_tokens=16384", f"--only={','.join(NAMES[:2])}",
            ),
            None, False,
        ),
        "unread": (command("x", "expert", "--config.evaluation.search.name=memory"), None, False),
        "schemes": (
            command(
                "x", "endpoint", "--config.style=chat", f"--base_url={fake.base_url}", "--model=m", "--api_key_env=",
                "--config.evaluation.search.name=schemes", "--config.evaluation.samples=4", "--config.evaluation.turns=2",
            ),
            None, False,
        ),
        "key": (command("x", "endpoint", "--config.style=chat", "--base_url=http://h/v1", "--model=m", "--api_key_env=NO_KEY"), None, False),
        "config": (command("x", "expert", "--config.evaluation.sample=1"), None, False),
        "nothing": (["--workdir=empty", "--summary_only"], None, False),
        "flag": (["--workdir=x"], None, False),
    }
    with pytest.MonkeyPatch.context() as patch, fake:
        patch.chdir(folder)  # a socket's path is short
        listening.bind("s.sock")
        try:
            return dict(zip(cases, run(folder, *cases.values()), strict=True)) | {"folder": folder}
        finally:
            listening.close()


def test_interrupted_or_without_a_sandbox_the_same_command_goes_on(done):
    assert done["interrupted"].code == 130 and "the same command goes on where it stopped" in done["interrupted"].err
    assert done["gone"].code == 1 and done["gone"].err.strip().endswith("error: nobody answers at s.sock")
    assert done["whole"].code == 0, done["whole"].err
    folder = done["folder"] / "e"
    assert len((folder / "results.jsonl").read_text().splitlines()) == 6
    assert len((folder / "journal.jsonl").read_text().splitlines()) == 6, "each of the six kernels was judged once"
    assert sum(session["judged"] for session in json.loads((folder / "sessions.json").read_text())["sessions"]) <= 6


def test_the_table_says_what_the_judge_knows(done):
    out = done["whole"].out
    rows = {line[:32].strip(): line[32:].split() for line in out.splitlines() if "(" in line[32:] and not line.startswith(" ")}
    assert out.startswith("expert: 6 of 6 samples over 3 tasks (held_out), turns: 1")
    assert rows["compiled"][:2] == rows["correct (Fast_0)"][:2] == rows["Fast_1.5"][:2] == ["100.0", "%"]
    assert rows["Fast_2"][:2] == ["0.0", "%"] and rows["geometric mean"][:2] == ["2.00", "x"]
    for words in ("last turn, over eager", "level 1", "level 2", "best of k, over eager", "integrity: no rule fired", "without a kernel: 0 samples"):
        assert words in out
    assert "best turn" not in out and "PARTIAL" not in out
    summary = json.loads((done["folder"] / "e" / "summary.json").read_text())
    assert summary["settings"]["policy"]["policy"] == "expert" and summary["sessions"][-1]["versions"]["python"] and not summary["partial"]
    wrong = done["wrong"].out
    assert done["wrong"].code == 0 and "over torch.compile" in wrong and "integrity: reads_reference 6" in wrong


def test_an_endpoint_learns_while_it_is_evaluated(done):
    found = done["grows"]
    assert found.code == 0, found.err
    summary = json.loads((done["folder"] / "g" / "summary.json").read_text())
    assert summary["settings"]["search"] == {"name": "memory", "grow": True, "window": 4, "latest": False, "plain": 0}
    assert summary["growth"]["chunks"] == summary["growth"]["of"] == 2 and summary["growth"]["accepted"] == summary["growth"]["active"] >= 1
    assert "library: 0 skills at the beginning; " in found.out and (done["folder"] / "g" / "library.sqlite").exists()
    skills = [json.loads(line)["trajectory"]["skills"] for line in (done["folder"] / "g" / "results.jsonl").read_text().splitlines()]
    assert skills[0] == [] and skills[1] == ["helps_0"]


def test_a_summary_alone_compares_with_another_evaluation(done):
    assert done["summary"].code == 0, done["summary"].err
    out = done["summary"].out
    assert "wrong: 6 of 6 samples" in out and "less e, over the 3 tasks in both (here alone 0, there alone 0)" in out
    assert "-100.0 (-100.0 to -100.0)" in out and "differs: policy.policy: expert -> wrong" in out


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("settings", 1, "error: e holds another evaluation (policy.kernels: "),
        ("policy", 1, "error: --policy=experts: give run:RUNDIR"),
        ("only", 1, "error: --only=nothing: no such task in --split=held_out"),
        ("library", 1, "error: --library=skills: the policy expert reads no prompts"),
        ("endpoint", 1, "error: --policy=endpoint: --base_url is missing"),
        ("key", 1, "error: the environment variable NO_KEY holds no key for h"),
        ("unread", 1, "error: evaluation.search {'name': 'memory', 'grow': False, 'window': 4, 'latest': False, 'plain': 0}: the policy expert"),
        ("schemes", 1, "error: evaluation.search.name='schemes' chooses among skills, and none are on offer: give --library"),
        ("nothing", 1, "error: empty holds no evaluation: there is no settings.json"),
        ("config", 2, "error: --config.evaluation.sample=1: the recipe has no key"),
    ],
)
def test_errors_are_one_line_that_says_what_is_wrong(done, name, code, said):
    found = done[name]
    lines = [line for line in found.err.splitlines() if line.strip()]
    assert found.code == code and "Traceback" not in found.err, found.err
    assert lines[0].startswith(said) and len(lines) == (1 if code == 1 else 2), found.err
    if name != "nothing":
        assert not (done["folder"] / "x" / "results.jsonl").exists(), "nothing is evaluated"


def test_a_missing_flag_is_named(done):
    assert done["flag"].code == 1 and "--config is missing" in done["flag"].out + done["flag"].err
