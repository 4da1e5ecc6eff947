"""The command line: a readable verdict, JSON alone, and clear errors."""

import os
import signal
import subprocess
import sys

import pytest

from sandbox.jail.probe import isolation
from sandbox.protocol import EvaluationResult
from tests.sandbox.helpers import ADD_BIAS, GOOD_BODY, ROOT, kernel


def run(*arguments, environment=None):
    return subprocess.run(
        [sys.executable, "-m", "sandbox", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(environment or {})},
    )


@pytest.fixture
def files(tmp_path):
    (tmp_path / "task.py").write_text(ADD_BIAS)
    (tmp_path / "good.cpp").write_text(kernel(GOOD_BODY).source)
    (tmp_path / "bad.cpp").write_text(kernel("oops;").source)
    return tmp_path


def test_eval_with_a_private_server_prints_a_verdict_and_cleans_up(files):
    environment = {"TMPDIR": str(files)}
    done = run(
        "eval",
        "--task",
        files / "task.py",
        "--candidate",
        files / "good.cpp",
        "--cache",
        files / "cache",
        "--timing",
        "quick",
        environment=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "outcome   ok (stage reached: timed)" in done.stdout
    assert "speedup" in done.stdout and "reward" in done.stdout and "eager" in done.stdout
    assert "on inputs never seen" in done.stdout
    assert list((files / "cache").glob("??/*")), "the cache persists"
    assert not list(files.glob("dk_sandbox*"))


def test_eval_json_is_the_result_model_alone(files, server):
    done = run(
        "eval",
        "--task",
        files / "task.py",
        "--candidate",
        files / "bad.cpp",
        "--socket",
        server.socket,
        "--json",
    )
    assert done.returncode == 0, done.stderr
    result = EvaluationResult.model_validate_json(done.stdout)
    assert result.outcome == "build_failed" and "oops" in result.feedback


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "--task", "none.py", "--candidate", "none.cpp"], "cannot read none.py"),
        (["eval", "--task", "{}/task.py", "--candidate", "{}/good.cpp", "--device", "cuda:7"], "device"),
        (
            [
                "eval",
                "--task",
                "{}/task.py",
                "--candidate",
                "{}/good.cpp",
                "--language",
                "triton",
                "--form",
                "kernel",
            ],
            "form 'kernel' exists for language 'cpp' only",
        ),
        (["serve", "--socket", "{}/task.py", "--device", "cpu"], "is no socket"),
        (["serve", "--socket", "{}/no/such/directory/s"], "cannot make the socket"),
        (["serve", "--socket", "/tmp/" + "x" * 200], "longer than 107 bytes"),
        (["serve", "--socket", "{}/s", "--device", "cuda:99"], "--device cuda:99"),
        (["serve", "--socket", "{}/s", "--device", "tpu"], "use cpu, cuda:N or auto"),
        (["serve", "--socket", "{}/s", "--workers", "0"], "--workers 0"),
        (
            ["serve", "--socket", "{}/s", "--device", "cpu", "--require", "cuda"],
            "cuda candidates cannot be judged",
        ),
        (["serve", "--socket", "{}/s", "--device", "cpu", "--cache", "/proc/none"], "cannot use the cache"),
        (["serve", "--socket", "{}/s", "--nonsense"], "unrecognized arguments"),
    ],
)
def test_wrong_use_gives_one_clear_error(files, arguments, words):
    done = run(*[argument.replace("{}", str(files)) for argument in arguments])
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_compiler_is_named_at_the_start(files, monkeypatch):
    done = run(
        "serve",
        "--socket",
        files / "s",
        "--device",
        "cpu",
        "--require",
        "cpp",
        environment={"CXX": "no-such-g++"},
    )
    assert done.returncode == 2
    assert "'no-such-g++' is not on the PATH" in done.stderr and "apt-get install g++" in done.stderr


def test_a_private_server_without_a_compiler_refuses_cpp(files):
    done = run(
        "eval",
        "--task",
        files / "task.py",
        "--candidate",
        files / "good.cpp",
        environment={"CXX": "no-such-g++"},
    )
    assert done.returncode == 2 and "apt-get install g++" in done.stderr


def test_doctor_reports_without_changing_anything():
    done = run("doctor")
    assert done.returncode == 0
    level = f"isolation level: {isolation().name} (the default here)"
    for words in ("C++ compiler", "Landlock", "user namespaces", level, "in force:", "lacking:"):
        assert words in done.stdout


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_eval_takes_its_server_along_and_a_killed_one_too(files, end):
    (files / "slow.py").write_text("import time\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "sandbox",
            "eval",
            "--task",
            str(files / "task.py"),
            "--candidate",
            str(files / "slow.py"),
            "--device",
            "cpu",
            "--language",
            "cpp",
        ],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(files)},
        stderr=subprocess.PIPE,
        text=True,
    )
    import psutil

    from tests.sandbox.helpers import descendants, eventually

    assert eventually(lambda: len(descendants(process.pid)) >= 3, 60)
    family = descendants(process.pid)
    process.send_signal(end)
    process.communicate(timeout=60)
    assert process.returncode == (130 if end == signal.SIGINT else -9)
    assert eventually(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family))


def test_a_server_and_its_clients_load_no_pytorch():
    """Which takes seconds and 200 MB, and is for oracles and jails."""
    code = "import sys, sandbox.cli, sandbox.server, sandbox.client, sandbox.compat.kernelbench; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
