"""Logs carry named fields in both forms, and a server's tell the life of each evaluation by its id."""

import json
import logging
import subprocess
import sys

import pytest

from sandbox.logs import configure, fields
from sandbox.protocol import Options
from tests.sandbox.helpers import GOOD_BODY, ROOT, kernel, running_server


@pytest.fixture
def written(capsys):
    """Configures the root logger and returns what one call of it wrote; afterwards it is as before."""
    root = logging.getLogger()
    handlers, level, hook = list(root.handlers), root.level, sys.excepthook

    def write(style, log, always=None):
        configure("INFO", style, always)
        log(logging.getLogger("sandbox.test"))
        return capsys.readouterr().err.splitlines()

    yield write
    root.handlers[:], sys.excepthook = handlers, hook
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_json_line_is_one_object_whatever_it_says(written):
    [line] = written("json", lambda log: log.info("one\ntwo %s", "three", extra=fields(evaluation="e", seconds=0.5, client=None)))
    found = json.loads(line)
    assert found.pop("time").endswith("+00:00")
    assert found == {"level": "INFO", "logger": "sandbox.test", "message": "one\ntwo three", "evaluation": "e", "seconds": 0.5}


def test_an_exception_stays_in_its_line(written):
    def log(logger):
        try:
            raise RuntimeError("broken")
        except RuntimeError:
            logger.exception("it failed")

    [line] = written("json", log)
    assert "RuntimeError: broken" in json.loads(line)["error"]


def test_text_shows_fields_behind_the_message(written):
    [line] = written("text", lambda log: log.warning("judged", extra=fields(outcome="ok", seconds=1 / 3, task='a "b"', note="")))
    assert line.endswith('sandbox.test WARNING judged outcome=ok seconds=0.333333 task="a \\"b\\"" note=""')


def test_some_fields_are_in_every_line_unless_there_is_nothing_to_say(written):
    current = {"evaluation": "e1", "other": None}
    [line] = written("json", lambda log: log.info("x"), lambda: current)
    assert json.loads(line)["evaluation"] == "e1" and "other" not in json.loads(line)
    assert written("json", lambda log: log.debug("too small")) == []


def test_control_characters_do_not_reach_a_terminal(written):
    [line] = written("text", lambda log: log.info("x", extra=fields(task="\x1b[2J")))
    assert "\x1b" not in line


def test_what_ends_a_process_is_a_line_too():
    program = "from sandbox.logs import configure; configure('INFO', 'json'); import warnings; warnings.warn('old'); 1 / 0"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    warned, ended = map(json.loads, done.stderr.splitlines())
    assert done.returncode == 1 and "old" in warned["message"] and "ZeroDivisionError" in ended["error"]


def test_a_field_does_not_take_the_place_of_what_each_line_has():
    with pytest.raises(ValueError, match="level, time"):
        fields(time=1, level="x")


def test_a_servers_log_tells_the_life_of_an_evaluation(short_dir, task):
    candidate = kernel(GOOD_BODY, "// logs")
    with open(short_dir / "log", "w") as log:
        with running_server(short_dir, "--workers", "1", "--log-level", "info", "--log-format", "json", output=log) as server:
            with server.client() as client:
                [result] = client.evaluate(task, [candidate], Options(timing="none"))
    lines = [json.loads(line) for line in (short_dir / "log").read_text().splitlines()]
    own = [line for line in lines if line.get("evaluation") == result.id and line["logger"] == "sandbox.scheduler"]
    assert [line["message"] for line in own] == ["queued", "started", "judged"]
    assert (own[0]["task"], own[0]["language"], own[1]["attempt"]) == ("add_bias_relu", "cpp", 1)
    assert (own[2]["outcome"], own[2]["cached"]) == ("ok", False) and own[2]["seconds"] > 0


def test_an_unknown_format_is_refused():
    command = [sys.executable, "-m", "sandbox", "serve", "--socket", "/nowhere", "--log-format", "xml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 2 and "--log-format" in done.stderr and "json" in done.stderr
