"""A reference whose class has another name than Model, rewritten so that it is called Model everywhere."""

from __future__ import annotations

import ast
import io
import tokenize
import warnings

NAME = "Model"


class EntryPointError(ValueError):
    """A source in which there is no such class; the message says which there are."""


UNPARSABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What `parse` raises for text that is no Python, or none of reasonable depth."""


def parse(source: str) -> ast.Module:
    """The syntax tree, without warnings of doubtful escapes and the like: sources are others'."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def as_model(source: str, entry_point: str) -> str:
    """The source with the class `entry_point` named Model. If something else in it has that name, it gets another one.

    Names are replaced token by token, so that everything else stays as it is. What follows a dot is left alone: it is an attribute.

    Raises:
      EntryPointError: the source defines no such class, or is no Python.
    """
    try:
        tree = parse(source)
    except UNPARSABLE as error:
        raise EntryPointError(f"not valid Python ({getattr(error, 'msg', error)})") from error
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if entry_point not in classes:
        raise EntryPointError(f"no class {entry_point}, which is the entry point; there is {', '.join(classes) or 'no class'}")
    if entry_point == NAME:
        return source
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    names = {token.string for token in tokens if token.type == tokenize.NAME}
    other = f"{NAME}Base"
    while other in names:
        other += "_"
    lines = list(io.StringIO(source))  # as the tokenizer counts them
    for before, token in reversed(list(zip(tokens, tokens[1:], strict=False))):
        to = {entry_point: NAME, NAME: other}.get(token.string) if token.type == tokenize.NAME else None
        if to is not None and before.string != ".":
            row, start = token.start
            line = lines[row - 1]
            lines[row - 1] = line[:start] + to + line[token.end[1] :]
    return "".join(lines)
