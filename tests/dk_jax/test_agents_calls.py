"""Selection and summary: calls that round trip, and everything malformed said and not raised."""

import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dk_jax.agents import selection, summary
from dk_jax.agents.text import TaskView
from dk_jax.skills.record import SkillDraft

STYLES = ("chat", "compact")
# A busy machine must not fail a test of what text means.
SLOW = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TASK = TaskView(
    name="softmax_rows",
    level=1,
    reference="class Model: ...",
    compact="x 8 8\nx = softmax(x, dim=-1)",
    language="cpp",
    form="kernel",
    signature="void kernel(...)",
)
NAME = st.from_regex(r"[a-z][a-z0-9]{0,8}(_[a-z0-9]{1,8}){0,3}", fullmatch=True)
# What a skill's text may hold: anything printable, quotes, backslashes and line breaks included.
LINE = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z"), include_characters=" "),
    min_size=1,
    max_size=30,
)
PROSE = LINE.map(lambda s: "a" + s.replace("<", "(") + "b")
CODE = st.sampled_from(
    ["for (long i = 0; i < n; ++i) y[i] = f(x[i]);", '#pragma omp simd // "\\n"', "@triton.jit"]
)
DRAFT = st.builds(
    lambda name, description, scope, tags, why, idea, code: SkillDraft(
        name=name,
        description=description,
        scope=scope,
        tags=tuple(tags),
        content=f"Motivation: {why}\nKey Idea: {idea}\nExample:\n{code}",
    ),
    NAME,
    PROSE,
    st.one_of(st.just("general"), NAME.map("task_specific/{}".format)),
    st.lists(st.from_regex(r"[a-z]{1,8}", fullmatch=True), min_size=3, max_size=6, unique=True),
    PROSE,
    PROSE,
    CODE,
)
GOOD = SkillDraft(
    name="row_threads",
    description="One thread block a row",
    scope="general",
    tags=("omp", "rows", "cpu"),
    content="Motivation: rows stand alone\nKey Idea: threads over rows\nExample: #pragma omp parallel for",
)
JUNK = st.one_of(
    st.text(max_size=80),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["select", "add", "skills", "name", "tags", "think", "arguments"]),
                inner,
                max_size=3,
            )
        ),
        max_leaves=8,
    ).map(json.dumps),
)


@pytest.mark.parametrize("style", STYLES)
@SLOW
@given(
    names=st.lists(NAME, max_size=3, unique=True), think=st.text(st.characters(codec="utf-8"), max_size=20)
)
def test_a_choice_is_read_back(style, names, think):
    think = think.replace("<", "(")
    choice = selection.parse(selection.format(names, style=style, think=think), names, style=style)
    assert choice == selection.Choice(names=tuple(names), reasons=("",) * len(names), think=think)


@pytest.mark.parametrize("style", STYLES)
def test_reasons_are_read_back_in_order(style):
    text = selection.format(
        ["b", "a"], style=style, think="memory bound", reasons=["fewer passes", "threads"]
    )
    choice = selection.parse(text, ["a", "b"], style=style)
    assert (choice.names, choice.reasons) == (("b", "a"), ("fewer passes", "threads"))


def test_the_compact_choice_is_terse():
    assert selection.format(["name1", "name2"], style="compact") == '{"select":["name1","name2"]}'


@pytest.mark.parametrize("style", STYLES)
def test_an_empty_choice_is_legal_and_no_error(style):
    choice = selection.parse(selection.format([], style=style), ["a"], style=style)
    assert choice.names == () and choice.error == ""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "not JSON"),
        ("I pick row_threads", "not JSON"),
        ('{"select":["a"', "not JSON"),
        ('["a"]', "not a JSON object"),
        ("{}", "'select' is missing"),
        ('{"select":"a"}', "not a list"),
        ('{"select":[3]}', "without a name"),
        ('{"select":[{"reason":"x"}]}', "without a name"),
        ('{"select":["zz"]}', "not on offer"),
        ('{"select":["a","a"]}', "twice"),
        ('{"select":["a","b","c","d"]}', "at most 3"),
        ("[" * 200_000, "not JSON"),
    ],
)
def test_a_malformed_choice_says_what_is_wrong_and_chooses_nothing(text, error):
    choice = selection.parse(text, list("abcd"), style="compact")
    assert error in choice.error
    assert choice.names == ()


def chat_call(body):
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"select":["a"]}', "'skills' is missing"),
        (selection.format(["a"], style="chat") * 2, "2 calls"),
        (selection.format(["a"], style="chat").replace("</tool_call>", ""), "not closed"),
        (chat_call('{"name": "add_skills", "arguments": {}}'), "only select_skills"),
        (chat_call('{"name": "select_skills", "arguments": [1]}'), "not an object"),
        (chat_call('{"name": "select_skills", "arguments": {"skills": ["a"]}}'), "without a name"),
        (f"<think>{selection.format(['a'], style='chat')}", "0 calls"),
    ],
)
def test_a_malformed_chat_call_says_what_is_wrong(text, error):
    assert error in selection.parse(text, ["a"], style="chat").error


def test_reasoning_and_prose_around_a_chat_call_do_not_matter():
    text = f"<think>maybe <tool_call> b?</think>\nI choose:\n{selection.format(['a'], style='chat')}\nDone."
    assert selection.parse(text, ["a", "b"], style="chat").names == ("a",)


def test_arguments_given_as_a_string_of_json_are_understood():
    arguments = json.dumps(json.dumps({"skills": [{"name": "a", "reason": ""}]}))
    text = chat_call('{"name": "select_skills", "arguments": ' + arguments + "}")
    assert selection.parse(text, ["a"], style="chat").names == ("a",)


def test_the_selection_prompt_shows_headers_and_no_content():
    for style in STYLES:
        prompt = selection.render(TASK, [GOOD], style=style, max_skills=2)
        for part in ("row_threads", "general", "omp", "One thread block a row", "2"):
            assert part in prompt
        assert "threads over rows" not in prompt


def test_the_retrieval_query_holds_name_and_computation():
    assert "softmax_rows" in selection.query(TASK) and "class Model" in selection.query(TASK)


@pytest.mark.parametrize("style", STYLES)
@SLOW
@given(drafts=st.lists(DRAFT, max_size=2, unique_by=lambda d: d.name))
def test_skills_are_read_back(style, drafts):
    notes = summary.parse(summary.format(drafts, style=style, think="t"), style=style)
    assert notes.error == ""
    assert notes.drafts == tuple(drafts)
    assert notes.think == "t"


@pytest.mark.parametrize("style", STYLES)
@SLOW
@given(junk=JUNK, wrap=st.booleans())
def test_no_message_makes_a_parser_raise(style, junk, wrap):
    text = chat_call('{"name": "add_skills", "arguments": ' + junk + "}") if wrap else junk
    assert isinstance(summary.parse(text, style=style), summary.Notes)
    text = text.replace("add_skills", "select_skills")
    assert isinstance(selection.parse(text, ["a"], style=style), selection.Choice)


def test_the_compact_notes_are_one_line_of_json():
    text = summary.format([GOOD], style="compact")
    assert text.startswith('{"add":[{"name":"row_threads","description":') and "\n" not in text


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"content": None}, "'content' is missing"),
        ({"tags": "omp, rows"}, "'tags' is missing"),
        ({"tags": ["omp", 3]}, "'tags' is missing"),
        ({"name": 7}, "'name' is missing"),
    ],
)
def test_a_skill_that_lacks_a_field_makes_the_call_malformed(change, error):
    text = json.dumps({"add": [{**dataclasses.asdict(GOOD), **change}]})
    notes = summary.parse(text, style="compact")
    assert error in notes.error and notes.drafts == ()


def test_more_skills_than_allowed_make_the_call_malformed():
    drafts = [dataclasses.replace(GOOD, name=f"skill_{i}") for i in range(3)]
    assert "at most 2" in summary.parse(summary.format(drafts, style="chat"), style="chat").error


def test_a_refused_skill_is_flagged_and_the_other_one_kept():
    bad = dataclasses.replace(
        GOOD,
        name="lazy",
        content="Motivation: slow\nKey Idea: call torch.matmul directly\nExample: y = torch.matmul(a, b)",
    )
    notes = summary.parse(summary.format([bad, GOOD], style="chat"), style="chat")
    assert notes.error == "" and notes.drafts == (GOOD,)
    assert notes.refused[0][0] == bad and "refused" in notes.refused[0][1][0]


def test_a_name_used_twice_in_one_call_counts_once():
    notes = summary.parse(summary.format([GOOD, GOOD], style="compact"), style="compact")
    assert notes.drafts == (GOOD,) and "twice" in notes.refused[0][1][0]


def test_content_is_bounded_by_the_models_own_tokens():
    text = summary.format([GOOD], style="compact")
    assert summary.parse(text, style="compact", count_tokens=lambda s: 513).drafts == ()
    assert summary.parse(text, style="compact", count_tokens=lambda s: 512).drafts == (GOOD,)


@pytest.mark.parametrize("style", STYLES)
def test_the_summary_prompt_shows_both_versions_with_their_speedups(style):
    prompt = summary.render(
        TASK,
        [GOOD],
        first_code="slow();",
        first_speedup=0.9,
        best_code="fast();",
        best_speedup=2.31,
        style=style,
    )
    for part in ("slow();", "fast();", "0.90x", "2.31x", "row_threads"):
        assert part in prompt
    assert prompt.index("slow();") < prompt.index("fast();")


def test_a_wrong_first_version_is_named_as_such():
    prompt = summary.render(
        TASK, [], first_code="", first_speedup=0.0, best_code="fast();", best_speedup=2.0, style="chat"
    )
    assert "First version (not correct)\n(no kernel)" in prompt


@pytest.mark.parametrize("style", STYLES)
def test_the_summary_prompt_tells_what_the_profiler_saw_and_nothing_where_none_ran(style):
    args = dict(first_code="slow();", first_speedup=0.9, best_code="fast();", best_speedup=2.31, style=style)
    plain = summary.render(TASK, [GOOD], **args)
    assert "rofile" not in plain and "overage" not in plain
    first, best = "coverage 12 %; at::native::reduce_kernel 88 % (not own)", "coverage 87 %; rows 87 % (own)"
    prompt = summary.render(TASK, [GOOD], first_profile=first, best_profile=best, **args)
    places = [prompt.index(part) for part in (first, "slow();", best, "fast();")]
    assert places == sorted(places)
    told = [line for line in prompt.splitlines() if first in line or best in line]
    assert [line for line in prompt.splitlines() if line not in told and line] == [line for line in plain.splitlines() if line]
    longest = summary.render(TASK, [GOOD], first_profile="k" * 10_000, best_profile="k" * 10_000, **args)
    assert len(longest) <= len(plain) + 2 * summary.MAX_PROFILE_CHARS + 200
