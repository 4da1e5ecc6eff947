"""Tool calls in the forms that models write them in: all are read alike, two are never chosen between, and what can't be read is said."""

import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dk_jax.agents import selection, summary
from dk_jax.agents.call_forms import FORMS, MAX_CHARS, MAX_DEPTH
from dk_jax.agents.calls import read_call
from tests.dk_jax.test_agents_calls import DRAFT, GOOD, chat_call

SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def xml(name, arguments, value=json.dumps, line="\n"):
    parts = [
        f"<parameter={key}>{line}{v if isinstance(v, str) else value(v)}{line}</parameter>" for key, v in arguments.items()
    ]
    return "\n".join([f"<function={name}>", *parts, "</function>"])


def python(name, arguments):
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())},)"


def call_of(name, arguments, key="arguments"):
    return {"name": name, key: arguments}


def fence(text, language="json"):
    return f"```{language}\n{text}\n```"


# Each writes a call as some models do; the key says which, and begins with the form that is to be recognised.
WRITERS = {
    "json_in_tags": lambda n, a: chat_call(json.dumps(call_of(n, a))),
    "json_in_tags, fenced": lambda n, a: chat_call(fence(json.dumps(call_of(n, a), indent=1))),
    "json_in_tags, parameters, in prose": lambda n, a: f"I call:\n{chat_call(json.dumps(call_of(n, a, 'parameters')))}\nDone.",
    "json_in_tags, string": lambda n, a: chat_call(json.dumps(call_of(n, json.dumps(a)))),
    "xml, in tags": lambda n, a: chat_call(xml(n, a)),
    "xml, alone": lambda n, a: f"Here:\n{xml(n, a, value=repr, line='')}",
    "function_tag": lambda n, a: f"<function={n}>{json.dumps(a)}</function>",
    "function_tag, in tags": lambda n, a: chat_call(f"<function={n}>\n{json.dumps(a)}\n</function>"),
    "python_tag": lambda n, a: f"<|python_tag|>{json.dumps(call_of(n, a, 'parameters'))}<|eom_id|>",
    "fenced": lambda n, a: f"My choice:\n{fence(json.dumps(call_of(n, a), ensure_ascii=False))}\nIt fits.",
    "fenced, arguments": lambda n, a: fence(json.dumps(a, indent=2), ""),
    "fenced, envelope": lambda n, a: fence(json.dumps({"tool_calls": [{"id": "c1", "type": "function", "function": call_of(n, json.dumps(a))}]})),
    "bare": lambda n, a: json.dumps(call_of(n, a)),
    "bare, arguments": lambda n, a: "\n" + json.dumps(a) + "\n",
    "bare, function": lambda n, a: json.dumps({"type": "function", "function": call_of(n, a)}),
    "bare, list": lambda n, a: json.dumps([call_of(n, a)]),
    "literal": lambda n, a: repr(call_of(n, a)),
    "literal, in tags": lambda n, a: chat_call(repr(call_of(n, a))[:-1] + ",}"),
    "literal, mixed": lambda n, a: fence("{'stop': true, 'id': null, 'name': '" + n + "', 'arguments': " + repr(a) + ",}"),
    "python": python,
    "python, in tags": lambda n, a: chat_call(python(n, a)),
    "python, fenced list": lambda n, a: f"So:\n{fence('[' + python(n, a) + ']', 'python')}",
    "python, tag": lambda n, a: "<|python_tag|>" + python(n, a),
}  # fmt: skip
UNNAMED = {"fenced, arguments", "bare, arguments"}  # hold no name of a function
TEXT = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(["[1] fuse", '{"a": 1}', "12", "null", "\\d \\400 \\", "'\"\"\""])
CHOICE = st.builds(
    lambda names, think, why: {"think": think, "skills": [{"name": name, "reason": why} for name in names]},
    st.lists(st.sampled_from("abcdefgh"), max_size=5),
    TEXT.map(lambda text: text.replace("<", "(").strip("\n")),  # line breaks around a value in tags are the tags'
    TEXT.map(lambda text: text.replace("<", "(")),
)


def test_every_form_has_a_writer_here():
    assert {key.partition(",")[0] for key in WRITERS} == set(FORMS)


@SLOW
@given(arguments=CHOICE, drafts=st.lists(DRAFT, max_size=2, unique_by=lambda d: d.name))
def test_equal_calls_in_different_forms_are_read_alike(arguments, drafts):
    wanted = selection.parse(WRITERS["json_in_tags"](selection.CALL, arguments), "abcd", style="chat")
    adds = json.loads(summary.format(drafts, style="compact", think="t"))
    for key, write in WRITERS.items():
        found = read_call(write(selection.CALL, arguments), selection.CALL, style="chat")
        assert (found.arguments, found.form, found.error) == (arguments, key.partition(",")[0], "")
        choice = selection.parse(write(selection.CALL, {**arguments, "extra": [1]}), "abcd", style="chat")
        assert choice == wanted and choice.form in ("", key.partition(",")[0])
        notes = summary.parse(write(summary.CALL, {"think": "t", "skills": adds["add"]}), style="chat")
        assert notes == summary.Notes(drafts=tuple(drafts), think="t") and notes.form == key.partition(",")[0]


@SLOW
@given(data=st.data(), arguments=CHOICE, key=st.sampled_from(sorted(WRITERS)))
def test_a_damaged_message_never_raises_nor_chooses_what_was_not_on_offer(data, arguments, key):
    text = WRITERS[key](selection.CALL, arguments)
    wanted = selection.parse(text, "abcd", style="chat")
    cut = selection.parse(text[: data.draw(st.integers(0, len(text)))], "abcd", style="chat")
    assert cut.error or cut == wanted, "a call that was cut short is whole or refused"
    place, until = (data.draw(st.integers(0, len(text))) for _ in range(2))
    pieces = ["<tool_call>", "</tool_call>", "<function=select_skills>", "</function>", "</parameter>", "```", "{", "]", "'", '"', "\\", "(", ","]
    for damaged in (
        text[:place] + data.draw(st.sampled_from(pieces)) + text[place:],
        text[: min(place, until)] + text[max(place, until) :],
        text[:place] + text,
        text.replace("name", "nom"),
    ):
        choice = selection.parse(damaged, "abcd", style="chat")
        assert set(choice.names) <= set("abcd") and len(choice.names) == len(set(choice.names)) <= 3
        assert not (choice.error and choice.names)
        assert isinstance(summary.parse(damaged, style="chat"), summary.Notes)
    for wrong in (WRITERS[key]("add_skill", arguments), text + "\n" + text):
        assert key in UNNAMED or selection.parse(wrong, "abcd", style="chat").error


@pytest.mark.parametrize("other", sorted(WRITERS))
@pytest.mark.parametrize("key", ["json_in_tags", "xml, alone", "fenced", "bare", "python"])
def test_two_calls_are_refused_whatever_their_forms(key, other):
    one, two = (WRITERS[k](selection.CALL, {"skills": [{"name": name}]}) for k, name in ((key, "a"), (other, "b")))
    assert selection.parse(one, "ab", style="chat").names == ("a",) and selection.parse(two, "ab", style="chat").names == ("b",)
    for text in (f"{one}\n{two}", f"{two}\n{one}"):
        choice = selection.parse(text, "ab", style="chat")
        assert choice.error and choice.names == ()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("I choose a.", "0 calls"),
        ("I choose:\n```json\n{\"skills\": []}", "last code block is not closed"),
        (fence("{}") + "\n" + fence("{}"), "2 calls"),
        ("[]", "0 calls"),
        (chat_call("{}") + "</tool_call>", "</tool_call> stands outside"),
        (chat_call("<tool_call>{}"), "begins within another"),
        (chat_call("<function=f></function><function=f></function>"), "more than one function"),
        ("<function=f><parameter=a>1</function>", "parameter a is not closed"),
        ("<function=f><parameter=a>1</parameter><parameter=a>1</parameter></function>", "a is given twice"),
        ("<function=f><parameter=a><parameter=b>1</parameter></parameter></function>", "<parameter= stands within parameter a"),
        ("<function=f>a = 1</function>", "outside of its parameters"),
        ("<function=f></function>", "only select_skills"),
        ("<function=select_skills></function>", "'skills' is missing"),
        (xml("select_skills", {"skills": "[{'name'"}), "'skills' is not a list: \"[{'name'\""),
        (xml("select_skills", {"skills": "[a(reason='x')]"}), "'skills' is not a list"),
        ('{"name": "select_skills", "arguments": "select_skills(skills=[])"}', "arguments is not an object"),
        ('{"skills": [], "skills": []}', "'skills' is given twice"),
        ("{'skills': [], 'skills': []}", "'skills' is given twice"),
        ("select_skills(skills=[], skills=[])", "'skills' is given twice"),
        ('{"name": "select_skills"}', "no arguments"),
        ('{"name": "select_skills", "function": "f", "arguments": {}}', "the call is of 'f'"),
        ('{"arguments": {"skills": []}}', "names no function"),
        ('{"name": "select_skills", "arguments": {}, "parameters": {}}', "both arguments and parameters"),
        ("select_skills([])", "arguments that have no name"),
        ("select_skills(**{'skills': []})", "nor Python"),
        ("select_skills(skills=[f(1)])", "call is no literal"),
        ("select_skills(skills=shown)", "name is no literal"),
        ("select_skills(skills=open('x').read())", "nor Python"),
        ("select_skills(skills=[i for i in ()])", "nor Python"),
        ("select_skills(skills={'a', 'b'})", "set is no literal"),
        ("select_skills(skills=[], think=f'{1}')", "prefix f"),
        ("select_skills(skills=[b'a'])", "prefix b"),
        ("{'skills': [], 1: 2}", "a key that is not text"),
        ("select_skills(skills=[0][0])", "nor Python"),
        ("select_skills(skills=" + "[" * MAX_DEPTH + "]" * MAX_DEPTH + ")", f"deeper than {MAX_DEPTH}"),
        (json.dumps({"skills": json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)}), f"deeper than {MAX_DEPTH}"),
        ("{" + "'" * 60_000, "nor Python"),
        ("{'" + "\\" * 60_000, "nor Python"),
        ("{'a': " + "-" * 60_000 + "1}", "nor Python"),
        ("{'a': 1" + " -1" * 20_000 + "}", "nor Python"),
        ("[" + "not " * 15_000 + "1]", "nor Python"),
        ("select_skills" + "()" * 25_000, "nor Python"),
        ("[" * 60_000, f"deeper than {MAX_DEPTH}"),
        ('{"a":' * 12_000, f"deeper than {MAX_DEPTH}"),
        ("<tool_call>" * 5_000, "not closed"),
        ("```\n{\n" * 7_000, "calls"),
        ("<tool_call>" * 100_000, f"at most {MAX_CHARS} are read"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_call_is_said_however_large_it_is(text, error):
    choice = selection.parse(text, ["a"], style="chat")
    assert error in choice.error and choice.names == () and len(choice.error) < 300


def test_python_strings_mean_what_they_mean_in_python():
    text = r"""{'think': 'a\'b\n\x41\u00e9 \d' "c" """ + "'''d\ne'''" + """, 'skills': []}"""
    assert selection.parse(text, [], style="chat").think == "a'b\nA\u00e9 \\dcd\ne"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "Row Threads"}, "not snake_case"),
        ({"name": "a" * 65}, "at most 64 characters"),
        ({"description": ""}, "description is empty"),
        ({"description": "a" * 121}, "at most 120"),
        ({"description": "a\nb"}, "more than one line"),
        ({"scope": "softmax"}, "neither 'general' nor"),
        ({"tags": ("omp",)}, "three to six"),
        ({"content": "Key Idea: b\nExample: c"}, "no section 'Motivation'"),
        ({"content": "Motivation: a\nExample: c"}, "no section 'Key Idea'"),
        ({"content": "Motivation: a\nKey Idea: b\nExample:"}, "no section 'Example'"),
        ({"content": GOOD.content + " word" * 600}, "at most 512"),
        ({"content": "Motivation: a\nKey Idea: call torch.softmax\nExample: c"}, "leave the work to a library"),
        ({"content": "Motivation: a\nKey Idea: b\nExample: y = torch.softmax(x)"}, "bypass writing kernels"),
        ({"description": "Skip writing a kernel"}, "bypass writing kernels"),
        ({"description": "Cache the output between calls"}, "reuses results"),
    ],
)
def test_a_skill_that_may_not_enter_a_library_says_why_in_every_form(change, reason):
    draft = dataclasses.replace(GOOD, **change)
    skills = [{**dataclasses.asdict(draft), "note": "ignored"}]
    for write in WRITERS.values():
        notes = summary.parse(write(summary.CALL, {"skills": skills}), style="chat", count_tokens=lambda text: len(text.split()))
        [(refused, problems)] = notes.refused
        assert refused == draft and notes.drafts == () and any(reason in problem for problem in problems)
