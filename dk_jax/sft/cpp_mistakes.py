"""Wrong and broken kernels: the mistakes that somebody who writes these kernels makes, applied to a kernel
that is right."""

from __future__ import annotations

import re
from collections.abc import Callable

from dk_jax.sft.cpp_ops import Variant

_STATEMENT = re.compile(r"^ *(?:/\*\d+\*/ )?v = .*;\n", re.MULTILINE)
_STEP_CONSTANT = re.compile(r"(?<=v = v [-+*/] )\d+\.\d+f(?=;)")

Mistake = Callable[[str], str]


def _replace(old: str, new: str, count: int = 0) -> Mistake:
    """A mistake that replaces a pattern, everywhere or `count` times."""
    return lambda source: re.sub(old, new, source, count=count)


def _drop_statement(which: int) -> Mistake:
    """Leave out the first or the last statement on the running value, in every loop that has it."""

    def mistake(source: str) -> str:
        found = [match.group() for match in _STATEMENT.finditer(source)]
        return source.replace(found[which], "") if found else source

    return mistake


def _wrong_constant(source: str) -> str:
    return _STEP_CONSTANT.sub(lambda match: f"{float(match.group()[:-1]) + 0.5}f", source)


def _accumulator_not_reset(source: str) -> str:
    """The accumulator is declared before the row loop: rows add up, and threads share it."""
    return re.sub(
        r"(#pragma omp parallel for.*\n)?(  for \(long i = .*\n    long r = .*\n)    (float s = 0\.0f;\n)",
        r"  \3\1\2",
        source,
        count=1,
    )


def _sum_overwritten(source: str) -> str:
    """`=` where `+=` was meant (in an inclusive scan the two are the same)."""
    return source if "inscan" in source else re.sub(r"(?m)^( *(?:/\*\d+\*/ )?\S+) \+= (.*;)$", r"\1 = \2", source)


_WRONG: tuple[Mistake, ...] = (
    _drop_statement(0),
    _drop_statement(-1),
    _wrong_constant,
    _accumulator_not_reset,
    _replace(r"v = v \+ (\w+\[)", r"v = v - \1"),
    _replace(r"v = v \* (\w+\[)", r"v = v + \1"),
    _replace(r"(bias|scale)\[j\]", r"\1[0]"),
    _replace(r"(\w+)\[i % \w+_n\]", r"\1[i % 2]"),
    _replace(r"expf\(-(v|\w+\[[^]]*\])\)", r"expf(\1)"),
    _replace(r"s \+= expf\(v - m\);", "s += expf(v);"),
    _replace(r"v > 0\.0f", "v < 0.0f"),
    _replace(r"fmaxf\((m|s|\w+\[j\]), ", r"fminf(\1, "),
    _replace(r"fminf\((m|s|\w+\[j\]), ", r"fmaxf(\1, "),
    _replace(r"s / (x_d1|x_d0|\d+\.0f)", "s"),
    _replace(r"v = sqrtf\(s\);", "v = s;"),
    _replace(r"\+= v \* v;", "+= v;"),
    _replace(r"x\[r \+ j\]", "x[j]"),
    _replace(r"x\[i \* x_d1 \+ j\]", "x[j * x_d0 + i]"),
    _replace(r"out\[j \* x_d0 \+ i\]", "out[i * x_d1 + j]"),
    _replace(r"j \* \d+", "j"),
    _replace(r"w\[i \* \d+ \+ (\w+)\]", r"w[\1]"),
    _replace(r"w\[k \* out_d1 \+ j\]", "w[j]"),
    _replace(r"(\w+)\[j \* x_d1 \+ k\]", r"\1[k]"),
    _replace(r"long (\w+) = 0; \1 < (x_d1|out_d1|out_n|x_d0); \+\+", r"long \1 = 1; \1 < \2; ++", 1),
    _replace(r"long k = 0; k < (\w+_d\d); \+\+", r"long k = 1; k < \1; ++"),
    _sum_overwritten,
)

_BROKEN: tuple[Mistake, ...] = (
    _replace(r"float v = ", "v = "),
    _replace(r";\n( *)(out|v|s|t|m)\b", r"\n\1\2", 1),
    lambda source: source.rstrip()[:-1].rstrip() + "\n",
    _replace(r"\b(exp|tanh|sqrt|fabs|erf|fmax|fmin)f\(", r"fast_\1("),
    _replace(r"\bx\[", "input["),
    _replace(r"for \(long ", "for ("),
)


def wrong_variants(rights: list[Variant], at_most: int = 6) -> list[Variant]:
    """Kernels that compile and give wrong results.

    Args:
      rights: kernels of one task that are right; mistakes are made in turn in each.
      at_most: how many to return.
    """
    return _apply(rights, _WRONG, "wrong", at_most)


def broken_variants(rights: list[Variant], at_most: int = 3) -> list[Variant]:
    """Kernels that do not compile."""
    return _apply(rights, _BROKEN, "broken", at_most)


def _apply(rights: list[Variant], mistakes: tuple[Mistake, ...], intent: str, at_most: int) -> list[Variant]:
    seen = {right.source for right in rights}
    found: list[Variant] = []
    for index, mistake in enumerate(mistakes):
        right = rights[index % len(rights)]
        source = mistake(right.source)
        if source not in seen and len(found) < at_most:
            seen.add(source)
            found.append(Variant(source=source, techniques=right.techniques, intent=intent))
    return found
