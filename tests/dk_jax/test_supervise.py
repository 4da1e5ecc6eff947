"""A sandbox of the run's own: one that does not come up is an error, one that dies is started again, with patience."""

import logging
import sys
import time

import pytest

from dk_jax.rollout import supervise
from dk_jax.rollout.supervise import SandboxProcess, SandboxStartError


class Fake(SandboxProcess):
    """Runs a Python program in place of the server, and does not wait until it answers."""

    def __init__(self, program, log_path, **more):
        super().__init__([], log_path=log_path, **more)
        self._command = [sys.executable, "-S", "-c", program]

    def _wait_until_ready(self):
        pass


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(supervise, "LOOK_S", 0.01)
    monkeypatch.setattr(supervise, "SHORTEST_PAUSE_S", 0.01)


def test_one_that_ends_at_once_is_an_error_with_the_end_of_its_log(tmp_path):
    process = SandboxProcess(["--no-such-flag"], log_path=tmp_path / "log")
    with pytest.raises(SandboxStartError, match=r"(?s)stopped at once with status 2\. Its log .*no-such-flag"), process:
        pass
    assert process._process.returncode == 2


def test_one_that_never_answers_is_an_error_and_ended(tmp_path):
    class Silent(Fake):
        _wait_until_ready = SandboxProcess._wait_until_ready

    process = Silent("import time; print('here', flush=True); time.sleep(1000)", tmp_path / "log", start_timeout_s=1.0)
    with pytest.raises(SandboxStartError, match="did not answer within 1 s"), process:
        pass
    assert process._process.poll() is not None


def test_one_that_dies_again_and_again_is_started_with_longer_pauses_and_at_last_given_up(tmp_path, caplog, monkeypatch):
    pauses = []
    started = tmp_path / "started"
    with Fake(f"open({str(started)!r}, 'a').write('x')", tmp_path / "log", max_restarts=4) as process:
        wait = process._stopping.wait
        monkeypatch.setattr(process._stopping, "wait", lambda seconds: pauses.append(seconds) or wait(seconds))
        process._watcher.join(30)
        assert not process._watcher.is_alive()
    assert started.read_text() == "x" * 5
    assert "died again (status 0) and is not restarted" in caplog.text and caplog.text.count("starting it again") == 4
    between = [seconds for seconds in pauses if seconds != supervise.LOOK_S]
    assert between == sorted(between) and between[-1] >= 4 * between[0]


def test_a_start_that_fails_is_tried_again(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    tries = []
    with Fake("import time; time.sleep(1000)", tmp_path / "log") as process:
        spawn = process._spawn

        def failing():
            tries.append(1)
            if len(tries) < 3:
                raise OSError(28, "No space left on device")
            spawn()

        monkeypatch.setattr(process, "_spawn", failing)
        first = process.pid
        process._process.kill()
        give_up = time.monotonic() + 30
        while (process.pid == first or len(tries) < 3) and time.monotonic() < give_up:
            time.sleep(0.02)
        assert process.pid != first and process._process.poll() is None and len(tries) == 3
        assert caplog.text.count("could not be started: [Errno 28] No space left") == 2
    assert process._process.poll() is not None
