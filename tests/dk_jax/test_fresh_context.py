"""Turns that answer a fresh prompt: what it tells, what it leaves out, and that each turn is a sequence of its own."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from dk_jax.agents import policy
from dk_jax.agents.text import TaskView
from dk_jax.generation import Sample
from dk_jax.rollout import episode
from dk_jax.rollout.episode import RolloutConfig, StepRollouts
from dk_jax.rollout.speaker import Speaker
from dk_jax.rollout.trajectory import Trajectory, Verdict, load_trajectories, save_trajectories
from dk_jax.tasks.builtin import builtin_suite
from dk_jax.train.credit import CreditConfig, assign

VIEW = TaskView(name="t", level=1, reference="class Model: ...", compact="y = x", language="cuda", form="module")
WRONG = Verdict(outcome="incorrect", stage="built", reward=0.0, speedup=0.0, noisy=False, coverage=None, feedback="max abs err 0.5")
RIGHT = Verdict(outcome="ok", stage="timed", reward=1.0, speedup=1.5, noisy=False, coverage=None, feedback="bound by memory")
MESSAGE = "<think>\nlong secret\n```python\nold = 1\n```\n</think>\n\n```python\nnew = 2\n```\nOne pass\ninstead of two."


def attempts():
    return [
        policy.Attempt(source="kernel_one", summary="tiles", verdict=WRONG),
        policy.Attempt(source=None, summary="", verdict=Verdict.without_kernel("empty")),
        policy.Attempt(source="kernel_three", summary="", verdict=RIGHT),
    ]


def test_a_message_is_remembered_by_what_it_says_outside_reasoning_and_code():
    assert policy.own_summary(MESSAGE, style="chat") == "One pass\ninstead of two."
    assert policy.own_summary("<think>never closed", style="chat") == ""
    assert len(policy.own_summary("word " * 1000, style="chat")) <= policy.MAX_SUMMARY_CHARS
    assert policy.own_summary("void kernel() {}", style="compact") == ""
    assert policy.parse(MESSAGE, style="chat").source == "new = 2"


def test_a_fresh_prompt_tells_of_every_attempt_in_order():
    prompt = policy.render_first(VIEW, style="chat", attempts=attempts(), summarise=True)
    parts = [
        "class Model: ...", "### Attempt 1", "kernel_one", "Your summary: tiles", "Verdict: incorrect.", "max abs err 0.5", "### Attempt 2",
        "(no kernel)", "### Attempt 3", "kernel_three", "Verdict: correct, 1.50x", "bound by memory", "Write a faster", "two or three",
    ]  # fmt: skip
    places = [prompt.index(part) for part in parts]
    assert places == sorted(places) and prompt.count("Your summary") == 1
    assert policy.render_first(VIEW, style="chat", attempts=(), summarise=False) == policy.render_first(VIEW, style="chat")
    compact = policy.render_first(VIEW, style="compact", attempts=attempts())
    assert compact.splitlines() == ["kernel_one", "incorrect max err 0.5", "no_kernel: no kernel found: empty", "kernel_three", "ok 1.50x", "y = x"]


class Codec:
    """A token a character."""

    eos_id = 0

    def open_turn(self, text, first):
        return [1 if first else 2, *map(ord, text)]

    def decode(self, tokens):
        return "".join(chr(t) for t in tokens if t > 2)


class ScriptedSampler:
    """Says the messages that it was given, one a call; `fed` holds every prompt."""

    def __init__(self, messages):
        self.messages, self.fed, self.kept = list(messages), [], []

    def sample(self, params, prompts, agents, keys, *, max_new_tokens, temperature, conversations, keep):
        text, stop = self.messages.pop(0)
        self.fed += prompts
        self.kept.append(keep or any(conversations))
        tokens = [*map(ord, text), *([0] if stop == "eos" else [])]
        return [Sample(tokens=tokens, logp_sample=[-0.5] * len(tokens), logp_model=[-0.5] * len(tokens), stop=stop) for _ in prompts]

    def rest(self):
        """Holds nothing."""


CONFIG = RolloutConfig(
    selections=0, rollouts=1, turns=3, summaries=0, style="chat", language="cuda", form="module", max_policy_tokens=200,
    max_selection_tokens=1, max_summary_tokens=1, max_context_tokens=20_000, context="kernels",
)  # fmt: skip


def rollout(messages, *, room=20_000):
    task = builtin_suite().get("softmax_wide")
    trajectory = Trajectory(agent="policy", task=task.name, group=task.name)
    sampler = ScriptedSampler(messages)
    speaker = Speaker(sampler=sampler, params=None, codec=Codec(), max_context_tokens=room)
    judge = SimpleNamespace(evaluate=lambda asked, **_: [dataclasses.replace(RIGHT, reward=float(len(r.source))) for r in asked])
    episode.policy_turns(
        speaker, judge, [trajectory], [task], [()], config=CONFIG, seed_of=lambda t, turn: turn, phase="p", turns=CONFIG.turns
    )
    return trajectory, sampler


def said(n: int) -> str:
    return f"<think>secret {n}</think>```python\nkernel {n}\n```".replace("```python", "\n```python") + f"\nsummary {n}"


def test_each_turn_is_a_sequence_of_its_own_that_keeps_no_reasoning(tmp_path):
    trajectory, sampler = rollout([(said(1), "eos"), ("cut <think>", "length"), (said(3), "eos")])
    assert [p[0] for p in sampler.fed] == [1, 1, 1] and not any(sampler.kept)
    texts = [Codec().decode(p) for p in sampler.fed]
    assert "kernel 1" in texts[1] and "summary 1" in texts[1] and "(no kernel)" in texts[2] and not any("secret" in t for t in texts)
    assert [trajectory.tokens[s.start : s.start + len(p)] for s, p in zip(trajectory.sequences, sampler.fed, strict=True)] == sampler.fed
    assert [set(trajectory.turn_index[s]) for s in trajectory.sequences] == [{-1, 0}, {-1, 1}, {-1, 2}]
    save_trajectories(tmp_path / "t.jsonl", [trajectory])
    assert load_trajectories(tmp_path / "t.jsonl") == [trajectory]


def test_credit_gives_each_turns_row_its_own_advantage():
    good, bad = (rollout([(said(n), "eos") for n in numbers])[0] for numbers in ((1, 22, 333), (1, 2, 3)))
    bad.member = 1
    config = CreditConfig(gamma=0.0, min_group_std=1e-3, format_penalty=0.0, summary_cap=6.0, weights=(0.0, 1.0, 0.0), loss_scale=2.0)
    rows, _ = assign(StepRollouts(trajectories=[good, bad], proposals=[]), config=config, seed=0, step=0)
    assert [len(row.tokens) for row in rows] == [s.stop - s.start for t in (good, bad) for s in t.sequences]
    assert [row.weight for row in rows] == pytest.approx(6 * [1.0 / (6 * 2.0)])
    for row, advantage in zip(rows, [0.0, 1.0, 2.0, 0.0, -1.0, -2.0], strict=True):
        assert row.advantage == pytest.approx([advantage * own for own in row.loss]) and sum(row.loss) > 10


def test_where_not_all_fits_the_oldest_kernels_are_left_out_and_then_the_rollout_ends():
    whole, sampler = rollout([(said(n), "eos") for n in (1, 2, 3)])
    second, third = len(sampler.fed[1]), len(sampler.fed[2])
    assert third > second
    _, less = rollout([(said(n), "eos") for n in (1, 2, 3)], room=third - 1 + CONFIG.max_policy_tokens)
    text = Codec().decode(less.fed[2])
    assert "kernel 2" in text and "kernel 1" not in text
    short, _ = rollout([(said(n), "eos") for n in (1, 2, 3)], room=second - 1 + CONFIG.max_policy_tokens)
    assert len(short.turns) == 1 < len(whole.turns) == 3
