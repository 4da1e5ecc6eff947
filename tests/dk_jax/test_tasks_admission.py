"""What the sandbox finds out about tasks: kept by content as it comes, reported, and what it means for training and evaluation."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from configs.demo import get_config as demo
from dk_jax.rollout.judge import SandboxJudge
from dk_jax.tasks.records import BadRow, Records
from dk_jax.tasks.task import Task
from dk_jax.train import setup
from dk_jax.train.admission import ADMITTED, FILE, MARKED, REFUSED, AdmissionFile, admitted, category, examined, marks
from dk_jax.train.admission_report import SUMMARY, summary, table
from dk_jax.train.checks import check_config, check_tasks
from dk_jax.train.setup import ConfigError, TaskSets
from sandbox.client import SandboxUnavailable
from sandbox.protocol import Admission, Options, TaskFacts

ROOT = Path(__file__).resolve().parents[2]
SOUND = dict(input_bytes=4, output_bytes=4, state_bytes=0, peak_bytes=10**9, needed_bytes=2 * 10**9, total_bytes=10**11, trial_s=0.1, judging_s=2.5)


def facts(**changes) -> Admission:
    return Admission(facts=TaskFacts(**(SOUND | dict(eager_ms=0.5, eager_low_ms=0.4, eager_high_ms=0.6) | changes)))


def task(name: str, reference: str | None = None, split: str = "train") -> Task:
    return Task(name=name, level=1, family=name, split=split, reference=reference or f"# {name}\n")


class Client:
    """Finds what a reference says; `dies_at`: after so many answers nobody is there any more."""

    def __init__(self, dies_at: int | None = None):
        self.asked, self.dies_at = [], dies_at

    def examine(self, spec, options, timing):
        if len(self.asked) == self.dies_at:
            raise SandboxUnavailable("nobody answers")
        self.asked.append((spec.name, options, timing))
        if "fails" in spec.reference:
            return Admission(problem="the reference fails: NameError")
        if "zeros" in spec.reference:
            return facts(trivial=("zeros", "a constant"))
        return facts(launch_ms=0.3) if "short" in spec.reference else facts()

    def abort(self):
        """Nothing is ever waited for."""


def judge_on(client: Client, **options) -> SandboxJudge:
    fields = dict(device="cuda:0", language="triton", form="module", options=Options(**options), verify_options=Options(), max_parallel=1)
    return SandboxJudge(client=client, **fields)


A, ZEROS, SHORT, FAILS = task("a"), task("zeros"), task("short"), task("fails")
ALL = (A, ZEROS, SHORT, FAILS)


def test_each_task_is_asked_about_once_and_by_content(tmp_path):
    client, path = Client(), tmp_path / FILE
    found = examined(judge_on(client, check_s=7), ALL, path, device="cuda:0")
    assert {name: category(one) for name, one in found.items()} == {"a": ADMITTED, "zeros": REFUSED, "short": MARKED, "fails": REFUSED}
    assert [name for name, *_ in client.asked] == [t.name for t in ALL] and client.asked[0][1].check_s == 7 and client.asked[0][2] == "quick"
    again = examined(judge_on(client, check_s=7), (*ALL, task("b", A.reference)), path, device="cuda:0")
    assert len(client.asked) == 4 and again["b"] == found["a"]
    examined(judge_on(client, check_s=7), [task("a", "# other\n")], path, device="cuda:0")
    assert len(client.asked) == 5
    assert sum(json.loads(line)["task"] == "b" for line in path.read_text().splitlines()) == 1


def test_facts_of_another_kind_of_device_are_not_taken_over(tmp_path):
    examined(judge_on(Client()), [A], tmp_path / FILE, device="cpu")
    client = Client()
    examined(judge_on(client), [A], tmp_path / FILE, device="cuda:1")
    assert len(client.asked) == 1


def test_without_timing_none_is_asked_for():
    client, told = Client(), []
    judge_on(client, timing="none").examinations([A], lambda t, one: told.append((t, one)))
    assert client.asked[0][2] == "none" and told == [(A, facts())]


def test_who_is_cut_off_goes_on_where_it_was(tmp_path):
    path = tmp_path / FILE
    with pytest.raises(SandboxUnavailable):
        examined(judge_on(Client(dies_at=2)), ALL, path)
    assert len(path.read_text().splitlines()) == 2
    with open(path, "a") as file:
        file.write('{"task": "sho')  # killed in the middle of a line
    client = Client()
    assert set(examined(judge_on(client), ALL, path)) == {t.name for t in ALL}
    assert [name for name, *_ in client.asked] == ["short", "fails"]
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(ValueError, match=r"admission\.jsonl:1: damaged line .*Delete it"):
        AdmissionFile(path)


def test_what_was_refused_under_other_limits_is_asked_about_again(tmp_path):
    path = tmp_path / FILE
    examined(judge_on(Client(), check_s=5), ALL, path)
    client = Client()
    examined(judge_on(client, check_s=50), ALL, path)
    assert [name for name, *_ in client.asked] == ["fails"]  # facts hold whatever the limits are
    examined(judge_on(Client(dies_at=0), check_s=50), ALL, path)


def test_marks_for_evaluations_name_refusals_too(tmp_path):
    assert marks(tmp_path / FILE) == {}
    examined(judge_on(Client()), ALL, tmp_path / FILE)
    found = marks(tmp_path / FILE)
    assert set(found) == {"zeros", "short", "fails"}
    assert found["zeros"] == ["not admitted to training: zeros and a constant would pass as the answer"]
    assert found["short"][0].startswith("launch overhead: eager takes 0.5 ms") and "NameError" in found["fails"][0]


def test_training_leaves_out_what_is_refused_and_keeps_what_is_marked(tmp_path, caplog):
    held_out = tuple(dataclasses.replace(t, split="held_out") for t in (task("h"), task("h_zeros")))
    sets = TaskSets(train=ALL, held_out=held_out, generated=())
    client = Client()
    kept = admitted(sets, judge_on(client), tmp_path / FILE)
    assert [t.name for t in kept.train] == ["a", "short"] and [t.name for t in kept.held_out] == ["h"]
    assert "task zeros is left out, the sandbox refuses it: zeros and a constant would pass" in caplog.text
    assert admitted(sets, judge_on(Client(dies_at=0)), tmp_path / FILE) == kept  # nothing is asked again
    with pytest.raises(ConfigError, match="leaves 0 training and 1 held-out tasks; the first is zeros"):
        admitted(dataclasses.replace(sets, train=(ZEROS,)), judge_on(client), tmp_path / FILE)
    with pytest.raises(ConfigError, match="leave 4 training and 0 held-out tasks: both must be > 0"):
        admitted(dataclasses.replace(sets, held_out=()), judge_on(Client(dies_at=0)), tmp_path / FILE)


def test_the_report_tells_every_task_and_what_is_missing():
    client = Client()
    found = {t.name: client.examine(t, None, "quick") for t in ALL}
    unseen = task("unseen")
    records = Records(tasks=ALL, bad=(BadRow(file="rl.jsonl", row=7, reason="not JSON"),), merged={"a": 3})
    data = summary((*ALL, unseen), found, records, device="cuda:0")
    assert data["counts"] == {ADMITTED: 1, MARKED: 1, REFUSED: 2} and data["not_examined"] == ["unseen"] and data["device"] == "cuda:0"
    assert data["trivial"] == {"zeros": ["zeros", "a constant"]} and set(data["refused"]) == {"zeros", "fails"} and set(data["marks"]) == {"short"}
    text = table((*ALL, unseen), found, data)
    for words in ("REFUSED", "launch overhead: eager takes", "1.67 x", "500.0 us", "2 GB", "1 are not examined yet", "rl.jsonl: row 7: not JSON",
                  "5 tasks: 1 admitted, 1 admitted with marks, 2 refused", "2 rows repeat another's reference"):  # fmt: skip
        assert words in text, words
    assert "launch overhead is not known" not in text
    cpu = {"a": facts()}
    assert "launch overhead is not known: that shows on a GPU alone" in table((A,), cpu, summary((A,), cpu))


# --- where tasks come from, in a recipe ---------------------------------------------------------------------------------------------------

GOOD = "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x + {}\n" + (
    "def get_inputs():\n    return [torch.ones(3)]\ndef get_init_inputs():\n    return []\n"
)


def recipe(source: str, path, **changes):
    cfg = demo()
    cfg.sandbox.form, cfg.sft.steps = "module", 0
    cfg.tasks.update(dict(source=source, directory=str(path), generated=0, rl_fresh=0, rl_checked=0, levels=()) | changes)
    return cfg


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"code": GOOD.format(n), "class": "Net", "uuid": f"t{n}"}) for n in range(8)]
    path.write_text("\n".join([*lines, lines[0], "oops"]) + "\n")
    return path


def test_a_recipe_reads_records_and_tells_of_bad_rows(rows, caplog):
    cfg = recipe("records", rows)
    cfg.tasks.fields.entry_point = ("class",)
    tasks = setup.load_tasks(cfg)
    assert [t.name for t in tasks.held_out] == ["t3", "t7"] and len(tasks.train) == 6
    assert "class Model(torch.nn.Module)" in tasks.train[0].reference
    assert "row 10: not JSON" in caplog.text and "8 tasks; 1 rows repeat another's reference, 1 can't be used" in caplog.text
    cfg.tasks.rows, cfg.tasks.held_out_every = 4, 2
    assert [t.name for t in setup.load_tasks(cfg).held_out] == ["t1", "t3"]


def test_a_recipe_reads_modules(tmp_path):
    for name in ("a.py", "b.py", "c.py", "level2/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(GOOD.format(name[0] == "a").replace("Net", "Model"))
    tasks = setup.load_tasks(recipe("modules", tmp_path))
    assert [t.name for t in tasks.train] == ["a", "b", "c"] and [t.name for t in tasks.held_out] == ["level2/d"]
    alone = setup.load_tasks(recipe("modules", tmp_path, levels=(2,)))  # enough for an evaluation
    assert [t.name for t in (*alone.train, *alone.held_out)] == ["level2/d"]
    with pytest.raises(ConfigError, match="leave 1 training and 0 held-out tasks"):
        check_tasks(recipe("modules", tmp_path), alone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(source="files"), r"tasks.source is 'files': use 'builtin', .*'kernelbench', 'modules', 'records'"),
        (dict(directory="/no/such.jsonl"), "no such file; give one of"),
        (dict(levels=(5,)), "no task of level 5: there are levels 1"),
        (dict(kinds=("maps",)), r"tasks.kinds names \['maps'\]"),
    ],
)
def test_what_is_wrong_with_a_source_is_named(rows, changes, message):
    cfg = recipe("records", rows)
    cfg.tasks.fields.entry_point = ("class",)
    cfg.tasks.update(changes)
    with pytest.raises(ValueError, match=message):
        setup.load_tasks(cfg)


def test_numbers_out_of_range_are_named():
    for changes, message in ((dict(held_out_every=0), "tasks.held_out_every is 0"), (dict(rows=-1), "tasks.rows is -1")):
        cfg = demo()
        cfg.tasks.update(changes)
        with pytest.raises(ConfigError, match=message):
            check_config(cfg)


# --- the command --------------------------------------------------------------------------------------------------------------------------

DRIVER = """
import os, runpy, signal, sys, time
sys.path.insert(0, {root!r})
from dk_jax.train import setup
from tests.dk_jax import test_tasks_admission as scripted


class Client(scripted.Client):
    def examine(self, spec, options, timing):
        if len(self.asked) == self.dies_at:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        return super().examine(spec, options, timing)


def run(name, stop_at):
    setup.make_judge = lambda cfg, socket, journal: scripted.judge_on(Client(stop_at))
    child = os.fork()
    if not child:
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        sys.argv = [{script!r}, *{arguments!r}]
        code = 1
        try:
            runpy.run_path({script!r}, run_name="__main__")
        except SystemExit as done:
            code = done.code or 0
        finally:
            sys.stdout.flush()
            os._exit(code if isinstance(code, int) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


print(run("first", 5), run("second", None))
"""


def test_the_command_goes_on_and_reports_all(tmp_path, rows):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    arguments = [
        f"--config={ROOT}/configs/demo.py", f"--workdir={tmp_path / 'out'}", f"--sandbox={tmp_path / 's'}", "--config.tasks.source=records",
        f"--config.tasks.directory={rows}", "--config.tasks.fields.entry_point=('class',)", "--config.tasks.levels=()",
        "--config.sandbox.form=module",
    ]  # fmt: skip
    driver = DRIVER.format(root=str(ROOT), script=str(ROOT / "scripts/admission.py"), arguments=arguments)
    done = subprocess.run([sys.executable, "-c", driver], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    first, second = ((tmp_path / name).read_text() for name in ("first", "second"))
    assert done.stdout.split() == ["130", "0"], done.stdout + done.stderr + first + second
    assert "interrupted; the same command goes on" in first and "8 tasks: 8 admitted, 0 admitted with marks, 0 refused" in second
    assert "row 10: not JSON" in second
    names = [json.loads(line)["task"] for line in (tmp_path / "out" / FILE).read_text().splitlines()]
    assert sorted(names) == [f"t{n}" for n in range(8)]
    data = json.loads((tmp_path / "out" / SUMMARY).read_text())
    assert data["counts"][ADMITTED] == 8 and data["not_examined"] == [] and data["rows"]["merged"] == {"t0": 2}
