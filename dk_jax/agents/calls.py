"""Tool calls in messages: written as JSON in <tool_call> tags (chat) or bare (compact), read in every form that models are known
to write (dk_jax.agents.call_forms). Reading never raises."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Collection
from typing import Any

from dk_jax.agents.call_forms import CallError, arguments_of, read_message
from dk_jax.agents.text import Style, after_thinking, is_compact

COMPACT = "compact"
"""The form of compact messages; those of chat messages are `dk_jax.agents.call_forms.FORMS`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What a message calls.

    Attributes:
        arguments: of its one call; {} with an error.
        form: how the call was written, one of `FORMS` or `COMPACT`; "" with an error.
        error: what is wrong with it, "" if nothing is.
    """

    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    form: str = ""
    error: str = ""


def write_call(name: str, arguments: dict[str, Any], *, style: Style) -> str:
    """The message that makes a call. Compact style writes the arguments alone, in one line."""
    if is_compact(style):
        return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def read_call(text: str, name: str, *, style: Style, plain: Collection[str] = ("think",)) -> Reading:
    """Reads the one call of a message.

    Args:
        text: the whole message. In chat style reasoning and prose around the call are passed over.
        name: the function that must be called (chat style; a compact message holds the arguments alone).
        plain: arguments that are text, also where they look like JSON in a form whose values have no type.
    """
    if is_compact(style):
        return _read_object(text)
    try:
        value, form = read_message(after_thinking(text), name, plain=plain)
        arguments, form = arguments_of(value, form, name)
    except CallError as error:
        return Reading(error=str(error))
    return Reading(arguments=arguments, form=form)


def listed(arguments: dict[str, Any], key: str) -> tuple[list[Any], str]:
    """The list that an argument must be, and "" or what is wrong with it."""
    if key not in arguments:
        return [], f"{key!r} is missing"
    items = arguments[key]
    return (items, "") if isinstance(items, list) else ([], f"{key!r} is not a list: {reprlib.repr(items)}")


def _read_object(text: str) -> Reading:
    try:
        # strict=False lets a line break stand inside a string: a slip that does not change what is meant.
        value = json.loads(text.strip(), strict=False)
    except (ValueError, RecursionError) as error:
        return Reading(error=f"the message is not JSON: {str(error)[:80]}")
    if not isinstance(value, dict):
        return Reading(error="the message is not a JSON object")
    return Reading(arguments=value, form=COMPACT)
