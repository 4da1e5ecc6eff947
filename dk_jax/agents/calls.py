"""Tool calls in messages, as JSON: in <tool_call> tags (chat) or bare (compact). Reading never raises."""

from __future__ import annotations

import json
from typing import Any

from dk_jax.agents.text import Style, after_thinking, is_compact

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def write_call(name: str, arguments: dict[str, Any], *, style: Style) -> str:
    """The message that makes a call. Compact style writes the arguments alone, in one line."""
    if is_compact(style):
        return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{_OPEN}\n{call}\n{_CLOSE}"


def read_call(text: str, name: str, *, style: Style) -> tuple[dict[str, Any], str]:
    """The arguments of the one call in a message, and "" or what is wrong with it.

    Args:
        text: the whole message. In chat style reasoning and prose around the call are passed over.
        name: the function that must be called (chat style; a compact message holds the arguments alone).
    """
    if is_compact(style):
        return _read_object(text, "the message")
    text = after_thinking(text)
    calls = text.count(_OPEN)
    if calls != 1:
        return {}, f"the message holds {calls} {_OPEN} blocks; exactly one call of {name} is expected"
    body, closed, _ = text.split(_OPEN)[1].partition(_CLOSE)
    if not closed:
        return {}, f"the call is not closed by {_CLOSE}"
    call, error = _read_object(body, "the call")
    if error:
        return {}, error
    if call.get("name") != name:
        return {}, f"the call is of {call.get('name')!r:.40}; only {name} may be called"
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        return _read_object(arguments, "arguments")
    if not isinstance(arguments, dict):
        return {}, "arguments is not an object"
    return arguments, ""


def _read_object(text: str, what: str) -> tuple[dict[str, Any], str]:
    try:
        # strict=False lets a line break stand inside a string: a slip that does not change what is meant.
        value = json.loads(text.strip(), strict=False)
    except (ValueError, RecursionError) as error:
        return {}, f"{what} is not JSON: {str(error)[:80]}"
    if not isinstance(value, dict):
        return {}, f"{what} is not a JSON object"
    return value, ""
