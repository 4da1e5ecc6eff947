"""What CudaForge's Judge is asked and answers, and what the Coder is told of it (CudaForge, arXiv 2511.01884).

The Judge reads one kernel and its verdict and names one thing: of a wrong kernel the fault to be mended first, of a right one the bottleneck
to be removed first, by the card's data sheet and the few measurements that tell most. Its answer is a call like the other agents', read in all
their forms. Field names and wording are ours. Chat style alone.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from dk_jax.agents import policy
from dk_jax.agents.calls import read_call, write_call
from dk_jax.agents.policy import MAX_FEEDBACK_CHARS
from dk_jax.agents.text import LANGUAGE_NAMES, TaskView, bounded, fenced, speed
from dk_jax.rollout.trajectory import Verdict
from dk_jax.skills.record import Skill

CALL = "judge_kernel"
MAX_FIELD_CHARS = 600
MAX_PROFILE_CHARS = 4000
MAX_EVIDENCE = 4
FAULT = {"issue": "Fault", "reason": "Why it matters", "fix": "Smallest fix"}
BOTTLENECK = {"bottleneck": "Bottleneck", "method": "Method", "expected": "Expected"}
"""Fields of the two answers, and what the Coder reads of them. The second may have `evidence` too."""

_FAULT_WANTED = """\
Name exactly one fault: the cause that has to be mended first, not its symptoms, and nothing about speed. Do not write the kernel.
Answer with one call:
"""
_BOTTLENECK_WANTED = """\
Name exactly one bottleneck, the one whose removal gains most, and one method to remove it. Choose the three or four measurements above that tell
most of it, no more, and give them as evidence. Do not write the kernel. Answer with one call:
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the Judge says of a kernel.

    Attributes:
        fields: FAULT's or BOTTLENECK's, and `evidence` where there is any; {} with an error.
        form: how the call was written (dk_jax.agents.calls.Reading).
        error: why it can't be read, "" if it can.
    """

    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    form: str = ""
    error: str = ""


def render(task: TaskView, source: str, verdict: Verdict, *, sheet: str = "", profile: bool = True) -> str:
    """The Judge's prompt.

    Args:
        source, verdict: the kernel and what the sandbox says of it.
        sheet: the card's data sheet, for a right kernel; "" for none.
        profile: tell what the profiler saw of a right one, hardware counters among it where the verdict has them.
    """
    language = LANGUAGE_NAMES[task.language]
    finding = "is right. Find what keeps it from being faster." if verdict.correct else "failed. Find out why."
    parts = [
        f"You review {language} kernels that take the place of a PyTorch model. Another author rewrites them by your advice. The one below {finding}",
        f"## Task {task.name}\n" + fenced(task.reference, "python"),
        "## Kernel\n" + fenced(source, task.fence),
        "## Verdict\n" + "\n\n".join(filter(None, [_outcome(verdict), bounded(verdict.feedback, MAX_FEEDBACK_CHARS)])),
    ]
    if verdict.correct and profile and verdict.profiled:
        parts.append("## Profile\n" + bounded(verdict.profiled, MAX_PROFILE_CHARS))
    if verdict.correct and sheet:
        parts.append("## Card\n" + sheet)
    parts.append("## Output\n" + (_BOTTLENECK_WANTED if verdict.correct else _FAULT_WANTED) + _example(verdict.correct))
    return "\n\n".join(parts)


def _outcome(verdict: Verdict) -> str:
    if not verdict.correct:
        return f"{verdict.outcome.replace('_', ' ')}."
    return f"Correct, {speed(verdict.speedup)} the speed of PyTorch eager." if verdict.speedup > 0 else "Correct, not timed."


def _example(correct: bool) -> str:
    if not correct:
        return format({"issue": "<what is wrong, and where>", "reason": "<how that makes it fail>", "fix": "<what to change, in a sentence>"})
    return format(
        {
            "bottleneck": "<what limits the kernel>",
            "evidence": ["<measurement and value>", "..."],
            "method": "<what to change, in a sentence or two>",
            "expected": "<what gets better by how much, and why>",
        }
    )


def format(fields: Mapping[str, Any]) -> str:
    """The message that makes the call."""
    return write_call(CALL, dict(fields), style="chat")


def parse(text: str, *, correct: bool) -> Judgement:
    """Reads the Judge's answer on a right kernel or a wrong one. Never raises."""
    wanted = BOTTLENECK if correct else FAULT
    call = read_call(text, CALL, style="chat", plain=tuple(wanted))
    if call.error:
        return Judgement(error=call.error)
    fields = {}
    for key in wanted:
        value = call.arguments.get(key)
        if not isinstance(value, str) or not value.strip():
            return Judgement(error=f"{key!r} is missing" if value is None else f"{key!r} is not one text: {reprlib.repr(value)}")
        fields[key] = bounded(value, MAX_FIELD_CHARS)
    evidence = call.arguments.get("evidence") if correct else None
    if isinstance(evidence, str):
        evidence = [evidence]
    if evidence and (not isinstance(evidence, list) or not all(isinstance(item, str) for item in evidence)):
        return Judgement(error=f"'evidence' is not a list of texts: {reprlib.repr(evidence)}")
    if evidence and len(evidence) > MAX_EVIDENCE:
        return Judgement(error=f"'evidence' has {len(evidence)} measurements; at most {MAX_EVIDENCE} may be chosen")
    if evidence and (said := "; ".join(filter(None, map(str.strip, evidence)))):
        fields["evidence"] = bounded(said, MAX_FIELD_CHARS)
    return Judgement(fields=fields, form=call.form)


def render_coder(
    task: TaskView, skills: Sequence[Skill], attempt: policy.Attempt, judgement: Judgement | None, *, unread: str = ""
) -> str:
    """The Coder's prompt after the first: task, skills, current kernel with its verdict, and the Judge's one instruction.

    Args:
        attempt: the current kernel; its source is None as long as no message held one.
        judgement: None, or one with an error: the Coder gets the verdict alone.
        unread: why no kernel could be read from the Coder's last message, "" if one could.
    """
    parts = [policy.render_first(task, skills, style="chat", attempts=[attempt])]
    if unread:
        parts.append(f"## Your last message\nIt held no kernel: {unread}. Attempt 1 above is from before it.")
    if judgement is not None and not judgement.error:
        fields, fault = judgement.fields, "issue" in judgement.fields
        wish = "a fault in it. Mend that and leave the rest as it is." if fault else "what limits it. Change that alone; results must stay the same."
        told = [f"- {label}: {fields[key]}" for key, label in (FAULT if fault else BOTTLENECK).items()]
        if "evidence" in fields:
            told.insert(1, f"- Seen in: {fields['evidence']}")
        parts.append(f"## Review\nWhoever reviewed attempt 1 names {wish}\n" + "\n".join(told))
    return "\n\n".join(parts)
