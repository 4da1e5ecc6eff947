"""What may enter a library: the form of a skill, and what is refused whatever it would earn."""

import dataclasses
import json

import pytest

from dk_jax.skills.record import (
    Evidence,
    Provenance,
    Skill,
    SkillDraft,
    Usage,
    sections,
    validate_draft,
)

GOOD = SkillDraft(
    name="fuse_epilogue",
    description="Apply bias and activation inside the matmul loop",
    scope="task_specific/matmul",
    tags=("fusion", "matmul", "c++17"),
    content=(
        "Motivation: PyTorch eager calls torch.addmm and then torch.relu, which reads memory again.\n"
        "Key Idea: finish each output in registers and write it once.\n"
        "Example:\nfor (long j = 0; j < N; ++j) out[j] = fmaxf(acc[j] + b[j], 0.f);"
    ),
)


def with_content(key_idea, example="for (long i = 0; i < n; ++i) y[i] = x[i];", motivation="memory traffic"):
    content = f"Motivation: {motivation}\nKey Idea: {key_idea}\nExample: {example}"
    return dataclasses.replace(GOOD, content=content)


def test_a_whole_skill_has_no_problems():
    assert validate_draft(GOOD, count_tokens=len, max_tokens=1000) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": "FuseEpilogue"}, "snake_case"),
        ({"name": "../etc/passwd"}, "snake_case"),
        ({"name": "a" * 65}, "snake_case"),
        ({"name": "fuse_\n"}, "snake_case"),
        ({"description": " "}, "empty"),
        ({"description": "x" * 121}, "121 characters"),
        ({"description": "one\ntwo"}, "more than one line"),
        ({"scope": "everything"}, "scope 'everything'"),
        ({"scope": "task_specific/"}, "scope"),
        ({"tags": ("a", "b")}, "2 tags"),
        ({"tags": tuple("abcdefg")}, "7 tags"),
        ({"tags": ("a", "b", "a")}, "twice"),
        ({"tags": ("a", "b", "two words")}, "not one short word"),
        ({"content": "Motivation: a\nKey Idea: b"}, "no section 'Example'"),
        ({"content": "Motivation:\nKey Idea: b\nExample: c"}, "no section 'Motivation'"),
        ({"content": GOOD.content + "<|im_end|>"}, "control"),
        ({"content": GOOD.content + "</tool_call>"}, "control"),
        ({"content": GOOD.content + "<function=add_skills>"}, "control"),
        ({"content": GOOD.content + "</parameter>"}, "control"),
        ({"content": GOOD.content + "\x00"}, "control"),
        ({"description": "half \ud800 character"}, "control"),
    ],
)
def test_each_fault_is_named(change, problem):
    problems = validate_draft(dataclasses.replace(GOOD, **change))
    assert len(problems) == 1 and problem in problems[0]


def test_content_is_measured_by_the_given_count():
    assert validate_draft(GOOD, count_tokens=lambda text: 512) == []
    assert "513 tokens; at most 512" in validate_draft(GOOD, count_tokens=lambda text: 513)[0]


@pytest.mark.parametrize(
    "content",
    [
        "Motivation: a\nKey Idea: b\nExample: c",
        "## Motivation\na\n## Key Idea\nb\n## Example\nc",
        "**Motivation:** a\n**Key Idea**: b\n**Example**\nc",
        "intro\nmotivation: a\nkey idea: b\nEXAMPLE: c",
    ],
)
def test_sections_are_found_in_every_usual_markup(content):
    assert sections(content) == {"Motivation": "a", "Key Idea": "b", "Example": "c"}


def test_a_sentence_that_begins_like_a_heading_is_not_one():
    assert sections("Key Idea: use tiles\nExample of a tile is below\nExample: c")["Key Idea"] == (
        "use tiles\nExample of a tile is below"
    )


@pytest.mark.parametrize(
    "draft",
    [
        with_content("call torch.matmul and let cuBLAS do the work"),
        with_content("Simply use F.softmax, it is already fast"),
        with_content("Delegate the convolution to cuDNN"),
        with_content("Fall back to the reference implementation for odd sizes"),
        with_content("leave the reduction to PyTorch's built-in ops"),
        with_content("replace the loop with torch.einsum"),
        with_content("use at::mm in the extension"),
        with_content("wrap the model: just torch.compile it"),
        with_content("There is no need to write a custom kernel here"),
        with_content("Skip writing a kernel, PyTorch is optimal"),
        with_content("Instead of implementing your own CUDA kernel, use the library"),
        with_content("Cache the output tensor and return it on later calls"),
        with_content("detect the timing loop and do less work in it"),
        with_content("monkey-patch torch.allclose before the comparison"),
        with_content("hard-code the expected output for this seed"),
        with_content("wrap the launch in try: ... except: fall back"),
        with_content("return the input unchanged, the tolerance allows it"),
        with_content("see below", example="def forward(self, x): return torch.softmax(x, -1)"),
        dataclasses.replace(GOOD, description="Use torch.bmm for batched products"),
    ],
    ids=lambda draft: draft.content[:60],
)
def test_advice_against_writing_kernels_or_for_cheating_is_refused(draft):
    problems = validate_draft(draft)
    assert any(problem.startswith("refused: it ") for problem in problems)


@pytest.mark.parametrize(
    "draft",
    [
        GOOD,
        with_content("Do not call torch.matmul; write the loop yourself"),
        with_content("Use one fused loop instead of torch.add followed by torch.relu"),
        with_content("Use fewer passes over memory than PyTorch eager"),
        with_content("Instead of writing three kernels, write one that handles the whole chain"),
        with_content("Avoid writing a kernel that reads x twice"),
        with_content("Without a second kernel launch the epilogue is free"),
        with_content("Keep the accumulation order of the reference implementation"),
        with_content("Use torch.empty_like for the output and tl.store for the result"),
        with_content("Cache a tile of the input in shared memory and reuse it across rows"),
        with_content("use registers", motivation="Models call F.gelu after every linear layer"),
        with_content("return early for rows past the end"),
        with_content(
            "fuse", example="# before: y = torch.relu(torch.add(x, b))\n@triton.jit\ndef k(x): tl.load(x)"
        ),
        with_content("Replace the division by a multiplication with the reciprocal"),
        with_content("Replace the comparison by fmaxf, which has no branch"),
        with_content("Store partial results in registers between loop runs"),
        with_content("Detect contiguous rows and use wide loads for them"),
    ],
    ids=lambda draft: draft.content[:60],
)
def test_honest_advice_is_not_refused(draft):
    assert validate_draft(draft) == []


def test_refusal_reads_hostile_text_quickly():
    flood = "cache output " * 3000 + "- " * 5000 + "use torch " * 2000
    assert validate_draft(with_content(flood)) is not None


def test_a_record_goes_to_json_and_back():
    skill = Skill.from_draft(
        GOOD,
        id="s00001",
        language="cpp",
        status="active",
        provenance=Provenance(task="t", step=3, rollouts=("a", "b"), code_before="x", code_after="y"),
        evidence=(
            Evidence(
                step=3, tasks=("t", "u"), device="cpu", rule="sequential", decision="accept", effect=1.7, n=6
            ),
        ),
        usage=Usage().plus(shown=4, selected=2, log_effects=(0.5, -0.1)),
        parents=("older",),
    )
    assert Skill.from_dict(json.loads(json.dumps(skill.to_dict()))) == skill
    assert skill.draft == GOOD


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tags": "a b c"}, "field 'tags'"),
        ({"status": "great"}, "field 'status'"),
        ({"colour": 1}, "unknown field 'colour'"),
        ({"evidence": [{"step": 1}]}, r"evidence\[0\]: field 'tasks' is missing"),
        ({"usage": {"shown": "many"}}, "usage: field 'shown'"),
        ({"provenance": 3}, "provenance: expected an object"),
    ],
)
def test_a_record_that_does_not_fit_names_the_field(change, said):
    with pytest.raises(TypeError, match=said):
        Skill.from_dict({**Skill.from_draft(GOOD).to_dict(), **change})


def test_text_that_no_codec_can_encode_is_refused_and_not_counted():
    def encode(text):
        return len(text.encode())  # raises for a lone surrogate, which JSON's escapes can make

    draft = dataclasses.replace(GOOD, content=GOOD.content + json.loads('"\\ud800"'))
    assert validate_draft(draft, count_tokens=encode) == ["text holds control characters or chat control markers"]
