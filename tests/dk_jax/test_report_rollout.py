"""Differences between kernels as they are shown, and what else is shown of a turn."""

from __future__ import annotations

import dataclasses
import html
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from dk_jax.evaluation.markup import visible
from dk_jax.evaluation.report_rollout import Prompts, diff_html, rollout_html
from dk_jax.rollout.trajectory import Trajectory
from tests.dk_jax.report_material import Page, trajectory, turn

LINES = st.lists(st.sampled_from(["a", "b", "  c;", "<d>", "", "\u202e"]), max_size=8)
UNKNOWN = Prompts(of_turns=(), note="")


def shown(markup: str) -> list[tuple[str, str]]:
    """Sign and text of each line of a diff."""
    found = re.findall(r'<span class="l (\w*)"><b>(.?)</b>(.*?)\n</span>', markup)
    return [(sign, html.unescape(re.sub(r"<.*?>", "", text))) for css, sign, text in found if css != "at"]


@settings(max_examples=80, deadline=None)
@given(LINES, LINES)
def test_taking_away_and_adding_what_a_difference_shows_makes_the_new_kernel_of_the_old(a, b):
    a, b = ["x", *a, "y"], ["x", *b, "z"]
    lines = shown(diff_html("\n".join(a), "\n".join(b)))
    said = [line.replace("\u202e", "U+202E") for line in a], [line.replace("\u202e", "U+202E") for line in b]
    old, new = [text for sign, text in lines if sign != "+"], [text for sign, text in lines if sign != "−"]
    for whole, part in zip(said, (old, new), strict=True):
        rest = iter(whole)
        assert all(line in rest for line in part), "in their order"
    added, removed = (sum(sign == mark for sign, _ in lines) for mark in "+−")
    assert len(b) - len(a) == added - removed
    assert len(old) + len(new) == 2 * sum(sign == " " for sign, _ in lines) + added + removed


def test_equal_kernels_and_ones_that_are_too_long_are_said_to_be():
    assert "The same kernel" in diff_html("a\nb", "a\nb\n")
    assert "No comparison: 1,000 and 1,001 lines" in diff_html("a\n" * 1000, "b\n" * 1001)


def test_what_can_not_be_seen_is_named_and_what_is_cut_is_counted():
    assert visible("a\r\nb\x07\u202e<\ud800", 99) == (
        'a\nb<span class="odd">U+0007</span><span class="odd">U+202E</span>&lt;<span class="odd">U+D800</span>'
    )
    assert visible("x" * 1234, 34) == "x" * 34 + "\n... (1,200 more characters)"


def test_a_turn_tells_all_that_its_verdict_carries():
    t = trajectory("relu", turn("ok", 2.0))
    t.advantages = [0.25]
    t.turns[0].verdict = dataclasses.replace(
        t.turns[0].verdict, speedups={"eager": 2.0, "torch.compile": 1.25}, noisy=True, speed_rewarded=False, cached=True, findings=("aliased",),
        profile="coverage 87 %; rows 87 % (own); roofline 33 % (memory-bound)",
    )  # fmt: skip
    text = Page(rollout_html(t, UNKNOWN, level=1)).text
    for said in ("2.00 ×", "1.25 ×", "torch.compile", "noisy", "speed not counted", "integrity: aliased", "judged before", "roofline 33 %"):
        assert said in text
    assert "reward 1.50 · advantage +0.25" in text


def test_calls_of_other_agents_are_conversations_too():
    call = Trajectory(agent="selection", task="relu", group="relu", scheme=1, skills=("tiles",), shown=("tiles", "lanes"))
    said = turn("no_kernel")
    said.verdict, said.error, said.text = None, "not a call", "I choose tiles"
    call.turns.append(said)
    text = re.sub(r"\s+", " ", Page(rollout_html(call, Prompts(of_turns=["which?"], note=""), level=None)).text)
    assert "Chosen skills: tiles" in text and "Skills on offer: tiles lanes" in text.replace("  ", " ")
    assert "Prompt, 6 characters which?" in text and "I choose tiles" in text and "can't be used: not a call" in text
