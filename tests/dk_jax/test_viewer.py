"""The viewer's plain output, line by line; colours on a terminal alone; and what its filters choose."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from dk_jax.rollout.trajectory import Trajectory, Turn, Verdict, save_trajectories
from dk_jax.rollout.viewer import View, choose, show

ROOT = Path(__file__).resolve().parents[2]


class Letters:
    """A codec of one token a character."""

    @staticmethod
    def encode(text):
        return [ord(c) for c in text]

    @staticmethod
    def decode(tokens):
        return "".join(map(chr, tokens))


def verdict(outcome="ok", speedup=0.0, **fields):
    stage = "timed" if outcome == "ok" else "built"
    given = dict(outcome=outcome, stage=stage, reward=speedup, speedup=speedup, noisy=False, coverage=None, feedback="")
    return Verdict(**(given | fields))


def trajectory(agent, task, *turns, fresh=False, **fields):
    """Each turn: prompt, answer, log-prob of its tokens, verdict."""
    found = Trajectory(agent=agent, task=task, group=task, **fields)
    for prompt, answer, logp, judged in turns:
        if fresh:
            found.start_sequence()
        found.append_prompt(Letters.encode(prompt))
        found.append_sample(Letters.encode(answer), logp)
        found.turns.append(Turn(text=answer, stop="eos", source=answer if judged else None, verdict=judged))
        found.rewards.append(judged.reward if judged else 0.5)
        found.advantages.append(found.rewards[-1] - 1.0)
    return found


LONG = "\n".join(f"line {i}" for i in range(12))
POLICY = trajectory(
    "policy", "softmax", (LONG, "ab", [-0.5, -1.5], verdict("incorrect", feedback="max err 1.0\nat 3")),
    ("go on", "c\x1b[31md", [-0.25] * 7, verdict(speedup=2.5, noisy=True, coverage=0.75, cached=True)),
    scheme=1, member=2, skills=("fuse", "lanes"),
)  # fmt: skip
SELECTION = trajectory("selection", "gelu", ("which?", "{}", [-1.0, -2.0], None), scheme=0, shown=("fuse",))
SELECTION.turns[0].error = "not a call"
CHECKED = trajectory("policy", "gelu", ("x", "k", [-1.0], verdict(speedup=0.0, reward=1.0)), scheme=-1, timed=False)
ALL = [SELECTION, POLICY, CHECKED]

GOLDEN = r"""3 trajectories (1 selection, 2 policy), 2 tasks; 3 shown

=== selection | task gelu | scheme 0 | rollout 0 | shown fuse ===
--- turn 0: prompt, 6 tokens
    which?
--- turn 0: answer, 2 tokens, stop eos
    {}
--- turn 0: reward 0.5000; advantage -0.5000; log-prob mean -1.5000, least -2.0000 at token 1, sum -3.00
error: not a call

=== policy | task softmax | scheme 1 | rollout 2 | skills fuse, lanes ===
--- turn 0: prompt, 85 tokens
    line 0
    line 1
    line 2
    line 3
    [... 5 lines ...]
    line 9
    line 10
    line 11
--- turn 0: answer, 2 tokens, stop eos
    ab
--- turn 0: reward 0.0000; advantage -1.0000; log-prob mean -1.0000, least -1.5000 at token 1, sum -2.00
verdict incorrect, stage built
    max err 1.0
    at 3
--- turn 1: prompt, 5 tokens
    go on
--- turn 1: answer, 7 tokens, stop eos
    c\x1b[31md
--- turn 1: reward 2.5000; advantage +1.5000; log-prob mean -0.2500, least -0.2500 at token 0, sum -1.75
verdict ok, stage timed, speedup 2.50x (noisy), coverage 75 %, cached

=== policy | task gelu | rollout 0 | only checked ===
--- turn 0: prompt, 1 tokens
    x
--- turn 0: answer, 1 tokens, stop eos
    k
--- turn 0: reward 1.0000; advantage +0.0000; log-prob mean -1.0000, least -1.0000 at token 0, sum -1.00
verdict ok, stage timed
"""


def text(trajectories, view=None, codec=Letters, **console):
    out = io.StringIO()
    show(trajectories, Console(file=out, width=40, highlight=False, **console), view or View(), codec)
    return out.getvalue()


def test_a_file_without_a_terminal_is_plain_text_and_no_line_is_broken():
    assert text(ALL) == GOLDEN


def test_a_terminal_gets_colours_and_never_what_a_model_wrote_to_it():
    seen = text([POLICY], force_terminal=True, color_system="standard")
    assert "\x1b[1;36m===" in seen
    assert "c\x1b[31md" not in seen
    assert r"c\x1b[31md" in re.sub(r"\x1b\[[0-9;]*m", "", seen)


def test_whole_prompts_one_turn_and_no_codec():
    assert "line 5" in text(ALL, View(full=True)) and "[..." not in text(ALL, View(full=True))
    one = text(ALL, View(turn=1))
    assert "turn 1" in one and "turn 0" not in one and "1 shown" in one
    assert "prompt, 85 tokens\n--- turn 0: answer" in text([POLICY], codec=None)


def test_a_prompt_ends_where_its_sequence_begins():
    fresh = trajectory("policy", "t", ("one", "A", [-1.0], verdict()), ("two", "B", [-1.0], verdict()), fresh=True)
    assert fresh.starts == (4,)
    assert "turn 1: prompt, 3 tokens\n    two\n" in text([fresh])


def test_filters_choose_by_task_and_agent_and_the_best_rollout_of_each_task():
    slower = trajectory("policy", "softmax", ("p", "s", [-1.0], verdict(speedup=1.5)))
    unpaid = trajectory("policy", "softmax", ("p", "u", [-1.0], verdict(speedup=9.0, speed_rewarded=False, reward=0.5)))
    found = [CHECKED, slower, POLICY, unpaid, SELECTION]
    assert choose(found, View(task="soft")) == [slower, POLICY, unpaid]
    assert choose(found, View(agent="selection")) == [SELECTION]
    assert choose(found, View(best=True)) == [POLICY, CHECKED]


@pytest.mark.parametrize(("flags", "status", "lines"), [([], 0, 3), (["--agent=policy"], 0, 2), (["--task=none"], 3, 0)])
def test_the_command_shows_a_file(tmp_path, flags, status, lines):
    path = tmp_path / "t.jsonl"
    save_trajectories(path, ALL)
    done = subprocess.run([sys.executable, ROOT / "scripts/trajectories.py", path, *flags], capture_output=True, text=True, timeout=100)
    assert done.returncode == status, done.stderr
    assert done.stdout.startswith(f"{path}\n3 trajectories") and done.stdout.count("===\n") == lines and "\x1b" not in done.stdout


def test_the_command_names_a_file_that_is_none(tmp_path):
    (tmp_path / "t.jsonl").write_text("{}\n")
    for name, said in (("t.jsonl", "t.jsonl:1: not a trajectory"), ("gone.jsonl", "No such file")):
        done = subprocess.run([sys.executable, ROOT / "scripts/trajectories.py", tmp_path / name], capture_output=True, text=True, timeout=100)
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
