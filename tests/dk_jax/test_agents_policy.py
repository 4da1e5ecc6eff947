"""The policy's prompts say what a candidate must look like; its parser gives back what was written, and never
raises."""

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dk_jax.agents import policy
from dk_jax.agents.text import TaskView, bounded, fenced, fenced_blocks, trimmed
from dk_jax.skills.record import SkillDraft

STYLES = ("chat", "compact")
# A busy machine must not fail a test of what text means.
SLOW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TASK = TaskView(
    name="add_relu",
    level=2,
    reference="import torch\n\nclass Model(torch.nn.Module):\n    pass\n",
    compact="x 64 128\nx = relu(x)",
    language="cpp",
    form="kernel",
    signature='extern "C" void kernel(const float* x, float* out)',
)
SKILL = SkillDraft(
    name="row_threads",
    description="One thread block a row",
    scope="general",
    tags=("omp", "rows", "cpu"),
    content="Motivation: rows stand alone\nKey Idea: threads over rows\nExample: #pragma omp parallel for",
)
# Everything that may stand in a file, apart from surrogates that no codec can encode.
TEXT = st.text(st.characters(codec="utf-8"), max_size=200)
CODE = st.lists(
    st.sampled_from(["```", "````cpp", "int x;", "  y = 2", "", "\t", "// `a`", "~~~", "</think>"])
).map("\n".join)


def verdict(outcome, feedback="", speedup=0.0):
    return SimpleNamespace(outcome=outcome, feedback=feedback, speedup=speedup)


@pytest.mark.parametrize("style", STYLES)
@SLOW
@given(source=st.one_of(TEXT, CODE))
def test_what_is_written_is_read_back(style, source):
    source = source.replace("\r", "\n").replace("</think>", "") if style == "chat" else source
    reply = policy.parse(policy.format(source, TASK, style=style), style=style)
    if trimmed(source):
        assert reply.source == trimmed(source)
        assert reply.error == ""
    else:
        assert reply.source is None and reply.error


@pytest.mark.parametrize("style", STYLES)
@SLOW
@given(text=st.one_of(TEXT, CODE))
def test_parsing_never_raises_and_gives_either_source_or_an_error(style, text):
    reply = policy.parse(text, style=style)
    assert (reply.source is None) == bool(reply.error)


@SLOW
@given(code=CODE, language=st.sampled_from(["cpp", "python"]))
def test_a_fence_holds_code_with_fences_in_it(code, language):
    blocks, open_ended = fenced_blocks(fenced(code, language))
    assert (blocks, open_ended) == ([trimmed(code)], False)


def test_of_several_blocks_the_last_with_the_entry_point_counts():
    first, last = "void kernel(float* a) { v1; }", "void kernel(float* a) { v2; }"
    text = f"Plan:\n```cpp\n{first}\n```\nBetter:\n```cpp\n{last}\n```\nRun:\n```\nmake\n```"
    assert policy.parse(text, style="chat").source == last


def test_code_in_the_models_reasoning_is_not_a_candidate():
    text = "<think>\n```cpp\nvoid kernel() { draft; }\n```\n</think>\n```cpp\nvoid kernel() { final; }\n```"
    assert policy.parse(text, style="chat").source == "void kernel() { final; }"
    assert policy.parse("<think>\n```cpp\nvoid kernel() {}\n```", style="chat").source is None


@pytest.mark.parametrize("text", ["", "no code here", "```cpp\nvoid kernel() {", "```cpp\n\n```"])
def test_a_chat_message_without_a_whole_block_says_why(text):
    reply = policy.parse(text, style="chat")
    assert reply.source is None
    assert "block" in reply.error


def test_the_compact_prompt_is_the_task_and_its_skills_and_nothing_else():
    assert policy.render_first(TASK, style="compact") == "x 64 128\nx = relu(x)"
    assert policy.render_first(TASK, [SKILL], style="compact") == (
        f"x 64 128\nx = relu(x)\nskills:\nrow_threads\n{SKILL.content}"
    )


def test_the_chat_prompt_holds_reference_rules_skills_and_output_format():
    prompt = policy.render_first(TASK, [SKILL], style="chat")
    for part in (
        TASK.reference.strip(),
        TASK.signature,
        "NAME_d0",
        SKILL.content,
        "```cpp",
        "exactly one code block",
    ):
        assert part in prompt
    assert "row_threads" not in policy.render_first(TASK, style="chat")


@pytest.mark.parametrize(
    ("language", "form", "said"),
    [
        ("triton", "module", "@triton.jit"),
        ("cuda", "module", "cuda_sources"),
        ("cpp", "module", "cpp_sources"),
    ],
)
def test_modules_are_asked_for_in_python(language, form, said):
    task = TaskView(name="t", level=1, reference="r", compact="c", language=language, form=form)
    prompt = policy.render_first(task, style="chat")
    assert said in prompt and "ModelNew" in prompt and "```python" in prompt
    assert policy.format("import torch", task, style="chat").startswith("```python\n")


def test_a_language_that_nobody_judges_is_an_error_that_names_those_that_are():
    task = TaskView(name="t", level=1, reference="r", compact="c", language="triton", form="kernel")
    with pytest.raises(ValueError, match="'triton' in form 'kernel'.*cpp kernel"):
        policy.render_first(task, style="chat")


def test_more_than_three_skills_and_unknown_styles_are_refused():
    with pytest.raises(ValueError, match="at most 3"):
        policy.render_first(TASK, [SKILL] * 4, style="compact")
    with pytest.raises(ValueError, match="'terse' is unknown"):
        policy.render_first(TASK, style="terse")


@pytest.mark.parametrize(
    ("outcome", "feedback", "speedup", "want"),
    [
        ("ok", "whatever", 1.837, "ok 1.84x"),
        ("ok", "", 0.0, "ok"),
        (
            "build_failed",
            "The compiler said:\nkernel.cpp: In function:\nkernel.cpp:3:15: error: 'y' is unknown\n",
            0.0,
            "build_failed: line 3 'y' is unknown",
        ),
        ("incorrect", "trial 0: max abs err 0.31 (allowed 1e-4)", 0.0, "incorrect max err 0.31"),
        ("incorrect", "Output 0: max_abs_err=3.2e-01, max_rel_err=2", 0.0, "incorrect max err 3.2e-01"),
        ("incorrect", "shape is [2, 3], expected [3, 2]", 0.0, "incorrect: shape is [2, 3], expected [3, 2]"),
        ("timeout", "", 0.0, "timeout"),
        (
            "no_kernel",
            "no kernel found: the message is empty",
            0.0,
            "no_kernel: no kernel found: the message is empty",
        ),
        ("runtime_error", "runtime_error: signal 11", 0.0, "runtime_error: signal 11"),
    ],
)
def test_compact_feedback_is_one_short_line_and_the_task_again(outcome, feedback, speedup, want):
    assert policy.render_feedback(verdict(outcome, feedback, speedup), TASK, style="compact") == f"{want}\n{TASK.compact}"


def test_a_compact_later_turn_ends_as_the_first_one_does():
    later = policy.render_feedback(verdict("ok", "", 1.5), TASK, style="compact")
    assert later.endswith("\n" + policy.render_first(TASK, style="compact"))


@pytest.mark.parametrize("style", STYLES)
def test_feedback_is_bounded_whatever_a_candidate_prints(style):
    flood = verdict("runtime_error", "error: " + "A" * 100_000)
    assert len(policy.render_feedback(flood, TASK, style=style)) < policy.MAX_FEEDBACK_CHARS + 300


def test_chat_feedback_tells_outcome_details_and_what_to_do():
    text = policy.render_feedback(verdict("build_failed", "kernel.cpp:3:1: error: x"), TASK, style="chat")
    assert "build failed" in text and "kernel.cpp:3:1: error: x" in text and "corrected version" in text
    assert "1.50x" in policy.render_feedback(verdict("ok", "", 1.5), TASK, style="chat")


@SLOW
@given(text=TEXT, limit=st.integers(60, 120))
def test_bounded_text_keeps_its_ends(text, limit):
    short = bounded(text, limit)
    assert len(short) <= limit
    assert short == text.strip() or (short[:5] == text.strip()[:5] and short[-3:] == text.strip()[-3:])


@pytest.mark.parametrize("style", STYLES)
def test_a_later_turn_may_keep_the_kernel_of_the_turn_before(style):
    for text in ("keep", " Keep\n", "<think>it is fast enough</think>\nKEEP"):
        assert policy.parse(text, style=style, previous="int a;") == policy.Reply(source="int a;")
        refused = policy.parse(text, style=style)
        assert refused.source is None and "no kernel of a turn before" in refused.error
    assert policy.parse("keep going", style="compact", previous="int a;").source == "keep going"
    again = policy.format("int a;\n", TASK, style=style, previous="int a;")
    assert policy.parse(again, style=style, previous="int a;").source == "int a;"
    assert (again == policy.KEEP) == (style == "compact")
    assert policy.format("int b;", TASK, style=style, previous="int a;") == policy.format("int b;", TASK, style=style)
