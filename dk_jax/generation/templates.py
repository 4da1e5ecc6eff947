"""How a checkpoint's own chat template (Jinja, as transformers renders it) writes turns, read off once.

Conversations are token in, token out: what a model has sampled is never rendered again. So a template is not run for each prompt; what it
writes around the first message and around a later one is found by rendering markers, and a template that would write earlier turns
anew, differently from how they stand, is refused, since the tokens of a conversation built turn by turn would not be those of the whole.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

_FIRST, _ANSWER, _LATER = "FIRST~MESSAGE", "THE~ANSWER", "LATER~MESSAGE"


@dataclasses.dataclass(frozen=True)
class TurnFormat:
    """How a user's turn is written, up to where the assistant begins.

    Each is a sequence of special tokens by name and pieces of text; "{text}" within a piece of text stands
    for the message.

    Attributes:
      first: the turn that opens a conversation.
      later: a turn that follows the assistant's sampled end-of-turn token.
      trims: messages are written without the white space around them.
    """

    first: tuple[str, ...]
    later: tuple[str, ...]
    trims: bool = False


class UnusableTemplate(ValueError):
    """A chat template that conversations can't be built by."""


def turn_format(template: str, specials: Iterable[str], eos: str, names: dict[str, str] | None = None) -> TurnFormat:
    """The format of user turns up to where the assistant begins.

    Args:
      template: Jinja source (`chat_template` of a tokenizer_config.json or of a GGUF's metadata).
      specials: names of the special tokens.
      eos: that which ends the assistant's turn.
      names: further variables of the template, such as bos_token.

    Raises:
      UnusableTemplate: it can't be rendered, loses a message, depends on the day, or writes earlier turns anew.
    """
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **{k: v for k, v in how.items() if k == "indent"})
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda _: _refuse("it writes today's date into the prompt")}

    def rendered(*contents: str) -> str:
        messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), contents, strict=False)]
        try:
            return environment.from_string(template).render(
                messages=messages, add_generation_prompt=True, eos_token=eos, tools=None, documents=None, **(names or {})
            )
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise UnusableTemplate(f"the chat template can't be rendered: {type(error).__name__}: {error}") from error

    trims = f" {_FIRST} " not in rendered(f" {_FIRST} ")
    first, whole = rendered(_FIRST), rendered(_FIRST, _ANSWER, _LATER)
    if first.count(_FIRST) != 1 or whole.count(_LATER) != 1 or whole.count(_ANSWER) != 1:
        raise UnusableTemplate("the chat template does not write each message once")
    if not whole.startswith(first + _ANSWER):
        raise UnusableTemplate("the chat template writes earlier turns otherwise than when they were the last: no conversation can go on by it")
    later = whole[len(first) + len(_ANSWER) :]
    if not later.startswith(eos):
        raise UnusableTemplate(f"the chat template does not end an answer with {eos!r}")
    known = sorted(specials, key=len, reverse=True)
    return TurnFormat(first=_pieces(first, _FIRST, known), later=_pieces(later.removeprefix(eos), _LATER, known), trims=trims)


def _pieces(text: str, marker: str, specials: list[str]) -> tuple[str, ...]:
    """Special tokens by name and what stands between them, "{text}" for the message."""
    if "{text}" in text:
        raise UnusableTemplate("the chat template holds the characters {text}, by which a message's place is known here")
    parts = re.split("(" + "|".join(map(re.escape, specials)) + ")", text.replace(marker, "{text}"))
    return tuple(part for part in parts if part)


def _refuse(message: Any) -> None:
    raise UnusableTemplate(f"the chat template refuses a conversation of user and assistant: {message}")
