"""Skills that say the same are found under any name, and refused before anything is executed for them."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import pytest

from dk_jax.rollout.trajectory import Trajectory
from dk_jax.rollout.verify import Call, Verifier
from dk_jax.sft.skill_topics import skill_catalogue
from dk_jax.sft.triton_topics import triton_catalogue
from dk_jax.skills.record import Skill, SkillDraft
from dk_jax.skills.sameness import same_as
from dk_jax.skills.verification import PaperRule

MOTIVATION = "Every separate operation reads its whole input from device memory and writes its whole result back."
IDEA = "Load each element once, apply all operations to the value in registers, and store it once at the end."
EXAMPLE = "v = tl.load(x_ptr + i, mask=mask)\nv = tl.maximum(v, 0.0)\ntl.store(out_ptr + i, v, mask=mask)"


def draft(name="fuse", motivation=MOTIVATION, idea=IDEA, example=EXAMPLE) -> SkillDraft:
    content = f"Motivation: {motivation}\nKey Idea: {idea}\nExample:\n{example}"
    return SkillDraft(name=name, description=f"about {name}", scope="general", tags=("a", "b", "c"), content=content)


OTHER = draft(
    "tiles",
    motivation="A column of a matrix is spread over memory, and most of each transaction is wasted.",
    idea="Let a program own a block of rows and columns, with a mask on both, and reduce the tile on the chip.",
    example="m = tl.program_id(0) * BM + tl.arange(0, BM)\nv = tl.load(x_ptr + m[:, None] * cols + n[None, :])",
)


@pytest.mark.parametrize(
    "again",
    [
        draft("other_name"),
        draft("spaced", idea=IDEA.upper().replace(" ", "  ")),
        draft("one_word_changed", idea=IDEA.replace("apply", "do"), example=EXAMPLE.replace("v = tl.max", "w = tl.max")),
        draft("same_code", motivation="Temporaries cost bandwidth.", idea="No tensor in between.", example=EXAMPLE.replace("\n", " \n  ")),
    ],
    ids=lambda d: d.name,
)
def test_a_skill_that_says_the_same_is_found(again):
    assert same_as(again, [OTHER, draft()]).name == "fuse"


@pytest.mark.parametrize(
    "other",
    [
        draft("another_number", example=EXAMPLE.replace("0.0", "6.0")),
        draft("other_words", motivation="Temporaries cost bandwidth.", idea="No tensor in between.", example="v = v + bias"),
    ],
    ids=lambda d: d.name,
)
def test_a_skill_that_says_something_else_is_not(other):
    assert same_as(other, [OTHER, draft()]) is None
    assert same_as(other, []) is None


def test_an_example_of_no_length_is_no_sign():
    assert same_as(draft(example="..."), [draft("x", motivation="Rows.", idea="One program each.", example="...")]) is None


@pytest.mark.parametrize("catalogue", [skill_catalogue, triton_catalogue])
def test_phrasings_of_a_topic_say_the_same_and_topics_differ(catalogue):
    told = [(t.topic, d) for t in catalogue() for d in t.phrasings]
    for (a, one), (b, two) in combinations(told, 2):
        expected = a == b and a != "one_pass"  # whose example is too short to tell
        assert (same_as(one, [two]) is not None) == expected, (one.name, two.name)


def screened(calls, active=(), room=9):
    verifier = Verifier(
        rule=PaperRule(), pairs_per_look=1, max_verifications=room, siblings=lambda t: [], device="cpu", language="triton"
    )
    trajectory = Trajectory(agent="summary", task="t", group="g")
    made = [Call(trajectory=trajectory, trigger=trajectory, drafts=list(drafts)) for drafts in calls]
    return verifier.screen(made, [Skill.from_draft(d) for d in active], lambda text: len(text.split()))


def test_a_proposal_that_repeats_an_active_skill_is_refused_with_its_name():
    again, new = screened([[draft("again"), OTHER]], active=[draft()])
    assert again.problems == ["skill 'fuse' says the same already"] and not new.problems


def test_of_two_proposals_of_a_step_that_say_the_same_the_first_is_verified():
    first, second, third = screened([[draft("first")], [draft("second"), OTHER]], room=2)
    assert not first.problems and not third.problems, "a repetition takes no room"
    assert second.problems == ["proposal 'first' of this step says the same"]


def test_a_refused_proposal_bars_nobody():
    broken, good = screened([[draft("Not A Name")], [draft("good")]])
    assert broken.problems and not good.problems


def test_what_others_of_the_step_took_leaves_a_proposal_untried_and_a_repetition_shares_the_verdict():
    first, again, crowded, crowded_again = screened([[draft("first")], [draft("again"), OTHER], [OTHER]], room=1)
    assert again.twin is first and not again.untried and not first.untried
    assert crowded.untried and crowded.twin is None and "only 1" in crowded.problems[0]
    assert crowded_again.twin is crowded and crowded_again.untried


def test_a_name_that_another_proposal_of_the_step_has_is_no_verdict_on_the_text():
    other = dataclasses.replace(OTHER, name="first")
    first, second = screened([[draft("first")], [other]])
    assert not first.problems and second.untried and second.twin is None and "is named 'first'" in second.problems[0]
