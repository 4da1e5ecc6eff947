"""Wrong and broken Triton modules: the mistakes that somebody who writes these kernels makes, applied to a
module that is right.

No mistake reads or writes outside a tensor: that would corrupt a process that interprets the kernel, and
prove nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from dk_jax.sft.cpp_ops import Variant

Mistake = Callable[[str], str]

# An elementwise statement on the running value; what reduces, loads or masks it is another matter.
_STATEMENT = re.compile(
    r"^ +v = (?=.*\bv\b)(?!.*tl\.(load|where|trans|sum|max|min|cumsum)\().*\n", re.MULTILINE
)


def _replace(old: str, new: str, count: int = 0) -> Mistake:
    """A mistake that replaces a pattern, everywhere or `count` times."""
    return lambda source: re.sub(old, new, source, count=count, flags=re.MULTILINE)


def _drop_statement(which: int) -> Mistake:
    """Leave out the first or the last statement on the running value, in every loop that has it."""

    def mistake(source: str) -> str:
        found = [match.group() for match in _STATEMENT.finditer(source)]
        return (
            re.sub(f"^ +{re.escape(found[which].lstrip())}", "", source, flags=re.MULTILINE)
            if found
            else source
        )

    return mistake


_WRONG: tuple[Mistake, ...] = (
    _replace(r'input_precision="ieee"', 'input_precision="tf32"'),
    _drop_statement(0),
    _drop_statement(-1),
    _replace(r"(v = v [-+*] )(\d+)\.(\d+)$", r"\g<1>1\2.\3"),
    _replace(r"^( +)for start in range\(0, (\w+), (\w+)\):", r"\1for start in range(\3, \2, \3):"),
    _replace(r"v = v \+ (\w+)$", r"v = v - \1"),
    _replace(r"v = v \* ([a-z]\w*)$", r"v = v + \1"),
    _replace(r"i % cols", "i // cols % cols"),
    _replace(r"\bv = tl\.max\(", "v = tl.min("),
    _replace(r"acc = tl\.maximum\(acc", "acc = tl.minimum(acc"),
    _replace(r"tl\.maximum\(v, 0\.0\)", "tl.minimum(v, 0.0)"),
    _replace(r"(tl\.sum\(.*\)|\bs) / (cols|rows|width)$", r"\1"),
    _replace(r"v = tl\.sqrt\((.*)\)$", r"v = \1"),
    _replace(r"tl\.maximum\(tl\.sqrt\(s\), ", "tl.maximum(s, "),
    _replace(r"v / tl\.sum\(v, (.*)\)", r"v / tl.max(v, \1)"),
    _replace(r"\+= v\b", "= v", 1),
    _replace(r"acc = tl\.dot\(a, b, acc, ", "acc = tl.dot(a, b, "),
    _replace(r"tl\.sigmoid\(", "tl.exp("),
    _replace(r"tl\.cumsum\(v, axis=\d\)( \+ carry)?", "v"),
    _replace(r"v = tl\.trans\(v\)\n", "v = -tl.trans(v)\n"),
    _replace(r"tl\.(store|atomic_add)\((.*), (v|acc), ", r"tl.\1(\2, 0.5 * \3, ", 1),
)

_BROKEN: tuple[Mistake, ...] = (
    _replace(r"tl\.constexpr\):$", "tl.constexpr)", 1),
    _replace(r"tl\.load\(x_ptr", "tl.load(input_ptr"),
    _replace(r"tl\.maximum\(v, 0\.0\)", "tl.relu(v)"),
    _replace(r"tl\.sigmoid\(", "tl.silu("),
    _replace(r"2\.0 \* tl\.sigmoid\(2\.0 \* (\w+)\) - 1\.0", r"tl.tanh(\1)"),
    _replace(r"tl\.arange\(0, (\w+)\)", r"tl.arange(\1)"),
    _replace(r"tl\.(sum|max|min)\((.*), axis=\d", r"tl.reduce_\1(\2", 1),
    _replace(r"^import triton\.language as tl\n", "", 1),
    _replace(r"tl\.store\((.*), mask=mask\)$", r"tl.store(\1, mask=valid)", 1),
)


def wrong_variants(rights: list[Variant], at_most: int = 6) -> list[Variant]:
    """Modules that run and give wrong results.

    Args:
      rights: modules of one task that are right; mistakes are made in turn in each.
      at_most: how many to return.
    """
    return _apply(rights, _WRONG, "wrong", at_most)


def broken_variants(rights: list[Variant], at_most: int = 3) -> list[Variant]:
    """Modules that do not load, or do not compile."""
    return _apply(rights, _BROKEN, "broken", at_most)


def _apply(rights: list[Variant], mistakes: tuple[Mistake, ...], intent: str, at_most: int) -> list[Variant]:
    seen = {right.source for right in rights}
    found: list[Variant] = []
    for index, mistake in enumerate(mistakes):
        # A mistake goes into the next module in turn that it changes.
        for offset in range(len(rights)):
            right = rights[(index + offset) % len(rights)]
            source = mistake(right.source)
            if source not in seen:
                break
        else:
            continue
        if len(found) < at_most:
            seen.add(source)
            found.append(Variant(source=source, techniques=right.techniques, intent=intent))
    return found
