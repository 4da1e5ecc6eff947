"""How row reductions and row normalisations are computed: on a whole row, or in sweeps over blocks of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A loop over a row: lines before it, in it (on the block `v`) and after it; {n} is the row's length."""

    init: tuple[str, ...]
    fold: tuple[str, ...]
    after: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a reduction or a normalisation is computed.

    Attributes:
      neutral: what stands in for columns that do not exist.
      whole: lines on a whole row `v`; {axis} is the arguments of a Triton reduction.
      sweeps: loops that collect what `apply` needs.
      apply: value of a normalised element, or of the reduction.
      online: sweeps that do the same in fewer passes, or empty.
    """

    neutral: str
    whole: tuple[str, ...]
    sweeps: tuple[Sweep, ...]
    apply: str
    online: tuple[Sweep, ...] = ()


_LOW, _HIGH = 'float("-inf")', 'float("inf")'
_MAX = Sweep(init=(f"m = {_LOW}",), fold=("m = tl.maximum(m, tl.max(v, axis=0))",))
_MIN = Sweep(init=(f"m = {_HIGH}",), fold=("m = tl.minimum(m, tl.min(v, axis=0))",))
_EXP = Sweep(init=("s = 0.0",), fold=("s += tl.sum(tl.exp(v - m), axis=0)",))
_ONLINE = Sweep(
    init=(f"m = {_LOW}", "s = 0.0"),
    fold=(
        "new = tl.maximum(m, tl.max(v, axis=0))",
        "s = s * tl.exp(m - new) + tl.sum(tl.exp(v - new), axis=0)",
        "m = new",
    ),
)


def _sum(value: str, *after: str) -> Sweep:
    return Sweep(init=("s = 0.0",), fold=(f"s += tl.sum({value}, axis=0)",), after=after)


_MOMENTS = Sweep(
    init=("s = 0.0", "q = 0.0"),
    fold=("s += tl.sum(v, axis=0)", "q += tl.sum(v * v, axis=0)"),
    after=("mean = s / {n}",),
)

NORMS: dict[str, Recipe] = {
    "softmax": Recipe(
        neutral=_LOW,
        whole=("v = tl.exp(v - tl.max(v, {axis}))", "v = v / tl.sum(v, {axis})"),
        sweeps=(_MAX, _EXP),
        apply="tl.exp(v - m) / s",
        online=(_ONLINE,),
    ),
    "log_softmax": Recipe(
        neutral=_LOW,
        whole=("v = v - tl.max(v, {axis})", "v = v - tl.log(tl.sum(tl.exp(v), {axis}))"),
        sweeps=(_MAX, _EXP),
        apply="v - m - tl.log(s)",
        online=(_ONLINE,),
    ),
    "layer_norm": Recipe(
        neutral="0.0",
        whole=(
            "mean = tl.sum(v, {axis}) / {n}",
            "v = tl.where(mask, v - mean, 0.0)",
            "var = tl.sum(v * v, {axis}) / {n}",
            "v = v * tl.rsqrt(var + 1e-5)",
        ),
        sweeps=(
            _sum("v", "mean = s / {n}"),
            Sweep(
                init=("q = 0.0",), fold=("d = tl.where(mask, v - mean, 0.0)", "q += tl.sum(d * d, axis=0)")
            ),
        ),
        apply="(v - mean) * tl.rsqrt(q / {n} + 1e-5)",
        online=(Sweep(init=_MOMENTS.init, fold=_MOMENTS.fold, after=("mean = s / {n}", "q = q - s * mean")),),
    ),
    "rms_norm": Recipe(
        neutral="0.0",
        whole=("ms = tl.sum(v * v, {axis}) / {n}", "v = v * tl.rsqrt(ms + 1e-5)"),
        sweeps=(_sum("v * v", "r = tl.rsqrt(s / {n} + 1e-5)"),),
        apply="v * r",
    ),
    "l2_normalize": Recipe(
        neutral="0.0",
        whole=("s = tl.sum(v * v, {axis})", "v = v / tl.maximum(tl.sqrt(s), 1e-12)"),
        sweeps=(_sum("v * v", "s = tl.maximum(tl.sqrt(s), 1e-12)"),),
        apply="v / s",
    ),
    "l1_normalize": Recipe(
        neutral="0.0",
        whole=("s = tl.sum(tl.abs(v), {axis})", "v = v / tl.maximum(s, 1e-12)"),
        sweeps=(_sum("tl.abs(v)", "s = tl.maximum(s, 1e-12)"),),
        apply="v / s",
    ),
    "center": Recipe(
        neutral="0.0",
        whole=("mean = tl.sum(v, {axis}) / {n}", "v = v - mean"),
        sweeps=(_sum("v", "mean = s / {n}"),),
        apply="v - mean",
    ),
    "max_shift": Recipe(neutral=_LOW, whole=("v = v - tl.max(v, {axis})",), sweeps=(_MAX,), apply="v - m"),
}

REDUCTIONS: dict[str, Recipe] = {
    "sum": Recipe(neutral="0.0", whole=("v = tl.sum(v, {axis})",), sweeps=(_sum("v"),), apply="s"),
    "mean": Recipe(
        neutral="0.0", whole=("v = tl.sum(v, {axis}) / {n}",), sweeps=(_sum("v"),), apply="s / {n}"
    ),
    "amax": Recipe(neutral=_LOW, whole=("v = tl.max(v, {axis})",), sweeps=(_MAX,), apply="m"),
    "amin": Recipe(neutral=_HIGH, whole=("v = tl.min(v, {axis})",), sweeps=(_MIN,), apply="m"),
    "l2": Recipe(
        neutral="0.0",
        whole=("v = tl.sqrt(tl.sum(v * v, {axis}))",),
        sweeps=(_sum("v * v"),),
        apply="tl.sqrt(s)",
    ),
    "var": Recipe(
        neutral="0.0",
        whole=(
            "mean = tl.sum(v, {axis}) / {n}",
            "v = tl.where(mask, v - mean, 0.0)",
            "v = tl.sum(v * v, {axis}) / {n}",
        ),
        sweeps=(_MOMENTS,),
        apply="q / {n} - mean * mean",
    ),
    "logsumexp": Recipe(
        neutral=_LOW,
        whole=("m = tl.max(v, {axis})", "v = m + tl.log(tl.sum(tl.exp(v - m), {axis}))"),
        sweeps=(_MAX, _EXP),
        apply="m + tl.log(s)",
        online=(_ONLINE,),
    ),
}

# Block-wide accumulators, folded once after the loop: (start, fold, value).
ACCUMULATORS: dict[str, tuple[str, str, str]] = {
    "sum": ("0.0", "acc += v", "tl.sum(acc, axis=0)"),
    "mean": ("0.0", "acc += v", "tl.sum(acc, axis=0) / {n}"),
    "amax": ("-inf", "acc = tl.maximum(acc, v)", "tl.max(acc, axis=0)"),
    "amin": ("inf", "acc = tl.minimum(acc, v)", "tl.min(acc, axis=0)"),
    "l2": ("0.0", "acc += v * v", "tl.sqrt(tl.sum(acc, axis=0))"),
}
