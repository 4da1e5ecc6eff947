"""Where a chat message holds its call, and what the call says: the forms in which models write tool calls.

    json_in_tags   <tool_call>{"name": NAME, "arguments": {...}}</tool_call> (Hermes, Qwen2.5, Qwen3)
    xml            <function=NAME><parameter=KEY>VALUE</parameter></function>, with or without <tool_call> tags around it
                   (Qwen3-Coder); a value is JSON or plain text
    function_tag   <function=NAME>{...}</function>, likewise (Llama 3.1)
    python_tag     <|python_tag|>{"name": NAME, "parameters": {...}} up to the end of the message (Llama 3.1)
    fenced         a Markdown code block that holds the call or its arguments, and nothing else
    bare           a message that is nothing but the call or its arguments
    literal        any of these with Python literals in place of JSON: single quotes, None, trailing commas
    python         any of these with NAME(key=value, ...) in place of JSON

Nothing is evaluated: Python is parsed, and only literals are taken. Reading takes time in proportion to the text; texts of more
than `MAX_CHARS` and values nested deeper than `MAX_DEPTH` are refused. Two calls are refused, never chosen between.
"""

from __future__ import annotations

import ast
import contextlib
import json
import keyword
import re
import reprlib
from collections.abc import Collection, Iterable
from typing import Any

from dk_jax.agents.text import fenced_blocks, prose

FORMS = ("json_in_tags", "xml", "function_tag", "python_tag", "fenced", "bare", "literal", "python")
MAX_CHARS = 2**16
MAX_DEPTH = 32
MAX_REASON_CHARS = 80

_OPENING = re.compile(r"<tool_call>|<function=([^<>\s]{1,100})>|<\|python_tag\|>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]{1,100})>")
_TAGS = ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", "<|python_tag|>")
_END_OF_MESSAGE = re.compile(r"<\|(?:eom|eot)_id\|>\s*\Z")

# What Python literals and calls are made of. Anything else (operators, attributes, keywords, comments) is refused before parsing, so
# that brackets alone nest, and these are counted. A string is one token whatever it holds.
_TOKEN = re.compile(
    r"""
      (?P<prefix>[A-Za-z]*)
      (?P<string> \"\"\"[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*\"\"\" | '''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''
                | "[^"\\]*(?:\\.[^"\\]*)*" | '[^'\\]*(?:\\.[^'\\]*)*' )
    | (?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?!\w))
    | (?P<name>[A-Za-z_]\w*)
    | (?P<open>[\[{(])
    | (?P<close>[\]})])
    | (?P<mark>[,:=])
    | [ \t\r\n\f]+
    """,
    re.VERBOSE | re.DOTALL,
)
_JSON_NAMES = {"true": "True", "false": "False", "null": "None"}
# A pair that Python does not know keeps its backslash (so does \400, an octal beyond a byte): doubled, it says so without a warning.
_ESCAPE = re.compile(r"\\(?:[\n\\'\"abfnrtvxNuU]|[0-3][0-7]{0,2}|[4-7][0-7]?(?![0-7]))|\\|[\n\r]")
_ESCAPED = {"\n": "\\n", "\r": "\\r", "\\": "\\\\"}


class CallError(Exception):
    """A message's call can't be read; the text says why."""


def read_message(text: str, name: str, *, plain: Collection[str]) -> tuple[Any, str]:
    """The value in which a chat message writes its one call, and the call's form.

    Args:
        text: the message without its reasoning. Prose around a call in tags or in a code block is passed over.
        name: the function that may be called; what it is called with need not be checked here.
        plain: parameters that are text even where they look like JSON (XML, whose values have no type).

    Returns:
        A value for `arguments_of`, and one of `FORMS`.

    Raises:
        CallError: no call, more than one, or one that can't be read.
    """
    if len(text) > MAX_CHARS:
        raise CallError(f"the message has {len(text)} characters; at most {MAX_CHARS} are read")
    whole = text.strip()
    problem = None
    if _begins_call(whole, name):  # if it is read to its end, tags and fences in it are in strings
        try:
            return _read_value(whole, "bare")
        except CallError as error:
            problem = error
    found, rest = _tagged(text)
    blocks, open_ended = fenced_blocks(rest)
    found += [("fenced", "", block) for block in blocks if _begins_call(block.strip(), name)]
    if not found:
        if problem is not None:
            raise problem
        open_block = "; its last code block is not closed" if open_ended else ""
        raise CallError(f"the message holds 0 calls{open_block}; exactly one call of {name} is expected")
    more = bool(re.search(rf"^[^\S\n]*\[?(?:\{{|{re.escape(name)}\()", prose(rest), re.MULTILINE))
    if len(found) + more > 1:
        raise CallError(f"the message holds {len(found) + more} calls; exactly one call of {name} is expected")
    form, function, body = found[0]
    if form == "function":
        return _read_function(function, body, plain)
    if form == "tool_call":
        return _read_tool_call(body, plain)
    return _read_value(body, form)


def arguments_of(value: Any, form: str, name: str) -> tuple[dict[str, Any], str]:
    """The arguments of the call that a value stands for, and its form.

    Understood are {"name", "arguments"} with "parameters" for "arguments" and the arguments as a string of JSON, the same in
    {"function": ...}, one call in a list or in {"tool_calls": [...]}, and an object of arguments alone.

    Raises:
        CallError: another function, no arguments or two sets of them, or not exactly one call.
    """
    if isinstance(value, dict) and "tool_calls" in value:
        value = value["tool_calls"]
    if isinstance(value, list):
        if len(value) != 1:
            raise CallError(f"the message holds {len(value)} calls; exactly one call of {name} is expected")
        value = value[0]
    if not isinstance(value, dict):
        raise CallError("the call is not an object")
    if isinstance(value.get("function"), dict):
        value = value["function"]
    given = [key for key in ("arguments", "parameters") if key in value]
    named = [value[key] for key in ("name", "function") if key in value]
    if not given and not named:
        return value, form
    if wrong := [called for called in named if called != name]:
        raise CallError(f"the call is of {reprlib.repr(wrong[0])}; only {name} may be called")
    if not named:
        raise CallError(f"the call names no function; only {name} may be called")
    if len(given) != 1:
        raise CallError("the call has both arguments and parameters" if given else "the call has no arguments")
    arguments = value[given[0]]
    if isinstance(arguments, str):
        arguments, form = _read_value(arguments, form)
        if form == "python":
            raise CallError("arguments is not an object but a call")
    if not isinstance(arguments, dict):
        raise CallError("arguments is not an object")
    return arguments, form


def _begins_call(text: str, name: str) -> bool:
    return text.startswith(("{", "[", f"{name}("))


def _tagged(text: str) -> tuple[list[tuple[str, str, str]], str]:
    """Calls in tags as (kind, function, body), and the text without them."""
    found, rest, at = [], [], 0
    while tag := _OPENING.search(text, at):
        rest.append(text[at : tag.start()])
        if tag.group() == "<|python_tag|>":
            found.append(("python_tag", "", _END_OF_MESSAGE.sub("", text[tag.end() :])))
            at = len(text)
            break
        kind = "function" if tag[1] else "tool_call"
        closing = f"</{kind}>"
        end = text.find(closing, tag.end())
        if end < 0:
            raise CallError(f"the call is not closed by {closing}")
        found.append((kind, tag[1] or "", text[tag.end() : end]))
        at = end + len(closing)
    rest.append(text[at:])
    outside = "".join(rest)
    if stray := next((tag for tag in _TAGS if tag in outside), ""):
        raise CallError(f"{stray} stands outside of a call")
    return found, outside


def _read_tool_call(body: str, plain: Collection[str]) -> tuple[Any, str]:
    body = body.strip()
    if "<tool_call>" in body:
        raise CallError("a <tool_call> begins within another")
    if (tag := _OPENING.match(body)) and tag[1]:
        found, rest = _tagged(body)
        if len(found) != 1 or rest.strip():
            raise CallError("a <tool_call> holds more than one function")
        _, function, body = found[0]
        return _read_function(function, body, plain)
    blocks, _ = fenced_blocks(body)
    if len(blocks) == 1 and not prose(body):
        body = blocks[0]
    return _read_value(body, "json_in_tags")


def _read_function(function: str, body: str, plain: Collection[str]) -> tuple[Any, str]:
    """Between <function=NAME> and </function>: parameters in tags, or one object."""
    if body.strip().startswith("{"):
        arguments, form = _read_value(body, "function_tag")
        return {"name": function, "arguments": arguments}, form
    arguments, at = {}, 0
    while tag := _PARAMETER.match(body, at):
        key = tag[1]
        end = body.find("</parameter>", tag.end())
        if end < 0:
            raise CallError(f"parameter {key[:40]} is not closed by </parameter>")
        value = body[tag.end() : end]
        if inner := next((tag for tag in _TAGS if tag in value), ""):
            raise CallError(f"{inner} stands within parameter {key[:40]}")
        if key in arguments:
            raise CallError(f"parameter {key[:40]} is given twice")
        arguments[key] = _read_parameter(value, is_text=key in plain)
        at = end + len("</parameter>")
    if between := body[at:].strip():
        raise CallError(f"{between[:40]!r} stands in a call outside of its parameters")
    return {"name": function, "arguments": arguments}, "xml"


def _read_parameter(text: str, *, is_text: bool) -> Any:
    """A parameter's value: JSON or a Python literal where it is an object or a list, else text without the line breaks at its ends."""
    text = text.removeprefix("\n").removesuffix("\n")
    if not is_text and text.lstrip().startswith(("{", "[")):
        # A value has no type: what is not read is text that begins with a bracket, and whoever wants a list says so.
        with contextlib.suppress(CallError):
            value, form = _read_value(text, "xml")
            return value if form != "python" else text
    return text


def _read_value(text: str, form: str) -> tuple[Any, str]:
    """A value in JSON or in Python, and `form`, or "literal" or "python" where it is not JSON."""
    text = text.strip()
    try:
        # strict=False lets a line break stand inside a string: a slip that does not change what is meant.
        value = json.loads(text, strict=False, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        try:
            return _read_python(text)
        except CallError as other:
            said = str(error)[:MAX_REASON_CHARS]
            raise CallError(f"the call is neither JSON ({said}) nor Python ({str(other)[:MAX_REASON_CHARS]})") from error
    _refuse_depth(value)
    return value, form


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise CallError(f"key {key[:40]!r} is given twice")
        value[key] = item
    return value


def _refuse_depth(value: Any) -> None:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        inner = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
        level = [item for item in inner if isinstance(item, (dict, list))]
        if not level:
            return
    raise CallError(f"the call is nested deeper than {MAX_DEPTH} levels")


def _read_python(text: str) -> tuple[Any, str]:
    """A literal, a call with literals as keyword arguments, or a list of such calls; and which notation it is."""
    try:
        node = ast.parse(_vetted(text), mode="eval").body
        if isinstance(node, ast.Call):
            return _read_python_call(node), "python"
        if isinstance(node, ast.List) and node.elts and all(isinstance(item, ast.Call) for item in node.elts):
            return [_read_python_call(item) for item in node.elts], "python"
        return _literal(node), "literal"
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise CallError(str(error).partition(" (<unknown>")[0] or type(error).__name__) from error


def _vetted(text: str) -> str:
    """The text as Python's parser may have it: tokens of literals and calls alone, of bounded depth, with Python's names for JSON's
    constants and line breaks in strings escaped."""
    out, at, depth, last = [], 0, 0, ""
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None or _is_code(token, last):
            raise CallError(f"{text[at : at + 10]!r} at character {at}")
        at, said, last = token.end(), token.group(), token.lastgroup or last  # white space has no group
        if token["open"] or token["close"]:
            depth += 1 if token["open"] else -1
            if depth > MAX_DEPTH:
                raise CallError(f"nested deeper than {MAX_DEPTH} levels")
        elif token["name"]:
            said = _JSON_NAMES.get(said, said)
        elif token["string"]:
            if token["prefix"]:
                raise CallError(f"a string with the prefix {token['prefix'][:10]}")
            said = _ESCAPE.sub(lambda found: _ESCAPED.get(found.group(), found.group()), said)
        out.append(said)
    return "".join(out)


def _is_code(token: re.Match[str], last: str) -> bool:
    """Whether a token goes on from a value, as in [0][0] and 1 -1, or is a keyword."""
    if last in ("string", "number", "close") and (token["open"] or token["number"]):
        return True
    return token["name"] not in (None, *_JSON_NAMES.values()) and keyword.iskeyword(token["name"])


def _read_python_call(node: ast.Call) -> dict[str, Any]:
    if not isinstance(node.func, ast.Name):
        raise CallError("what is called is not a plain name")
    if node.args or any(given.arg is None for given in node.keywords):
        raise CallError(f"{node.func.id[:40]} is called with arguments that have no name")
    return {"name": node.func.id, "arguments": _object((given.arg, _literal(given.value)) for given in node.keywords)}


def _literal(node: ast.expr) -> Any:
    """The value of a literal as JSON would give it: tuples become lists; what JSON does not know is refused."""
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _literal(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise CallError("an object has a key that is not text")
        return _object(zip(keys, map(_literal, node.values), strict=True))
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(item) for item in node.elts]
    if not isinstance(node, (ast.Constant, ast.UnaryOp)):
        raise CallError(f"{type(node).__name__.lower()} is no literal of JSON's kinds")
    return ast.literal_eval(node)
