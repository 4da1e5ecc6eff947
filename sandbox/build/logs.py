"""A compiler's output, made readable: its first errors, without this machine's paths."""

from __future__ import annotations

import re

MAX_CHARS = 3000
_ERROR_LINE = re.compile(
    r"(?:\berror\b\s*[:#]|fatal error|undefined reference|: error|ptxas fatal|ld: )", re.IGNORECASE
)
_PATH = re.compile(r"(?<![\w.)/])/(?:[^\s:'\"(),;/]+/)+(?=[^\s:'\"(),;/])")


def first_errors(text: str, limit: int = MAX_CHARS) -> str:
    """Shortens a failed build's output to the compiler's first errors, each with two lines of context.

    Directories are cut off file names. Without an error that is recognised, the last lines are kept.
    """
    lines = [
        _PATH.sub("", line)
        for line in text.splitlines()
        if not line.startswith("compilation terminated")
    ]
    kept: list[str] = []
    last = -1
    for number, line in enumerate(lines):
        if _ERROR_LINE.search(line):
            kept += lines[max(number, last) : number + 3]
            last = number + 3
    picked = "\n".join(kept) if kept else "\n".join(lines[-12:])
    return picked[:limit]
