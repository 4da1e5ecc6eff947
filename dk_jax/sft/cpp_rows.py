"""C++ kernels for row reductions and row normalisations: passes over each row, how their values are kept, on
how many lanes and threads."""

from __future__ import annotations

from dataclasses import dataclass

from dk_jax.sft.cpp_ops import Access, Code, Variant, mark, spec_of, statements, variant
from dk_jax.tasks.spec import MapStage, Stage
from dk_jax.tasks.task import Task

_LOW, _HIGH = "-1e30f", "1e30f"  # not INFINITY: the kernels are built with finite-math-only
_LANES = 16


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One sweep over a row that folds a value into an accumulator.

    Attributes:
      name: the accumulator.
      clause: how it folds, as OpenMP names it: +, max or min.
      value: what is folded in, an expression of the running value v.
      after: statements once the row is swept; {n} is the row's length.
    """

    name: str
    clause: str
    value: str
    after: tuple[str, ...] = ()

    @property
    def init(self) -> str:
        """Where the accumulator starts."""
        return {"+": "0.0f", "max": _LOW, "min": _HIGH}[self.clause]

    def fold(self, accumulator: str | None = None, value: str | None = None) -> str:
        """The statement that folds `value` into `accumulator` (by default the pass's own)."""
        accumulator, value = accumulator or self.name, value or self.value
        return (
            f"{accumulator} += {value};"
            if self.clause == "+"
            else f"{accumulator} = f{self.clause}f({accumulator}, {value});"
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a norm or a reduction is computed: passes, then an expression of v (norms) or of the accumulators
    (reductions)."""

    passes: tuple[Pass, ...]
    result: str
    divided: str | None = None  # a norm's expression with its division left inside the loop
    hoisted: tuple[str, ...] = ()  # statements that `result` needs and `divided` does not


def _sum(value: str, *after: str, name: str = "s") -> Pass:
    return Pass(name=name, clause="+", value=value, after=after)


_MAX = Pass(name="m", clause="max", value="v")
_MIN = Pass(name="m", clause="min", value="v")
_EXP = _sum("expf(v - m)")
_EPS = "1e-5f"

# {n} is the row's length.
NORMS: dict[str, Recipe] = {
    "softmax": Recipe(
        passes=(_MAX, _EXP),
        result="expf(v - m) * q",
        divided="expf(v - m) / s",
        hoisted=("float q = 1.0f / s;",),
    ),
    "log_softmax": Recipe(
        passes=(_MAX, _EXP), result="v - q", divided="v - m - logf(s)", hoisted=("float q = m + logf(s);",)
    ),
    "layer_norm": Recipe(
        passes=(_sum("v", "float m = s / {n};"), _sum("(v - m) * (v - m)", name="t")),
        result="(v - m) * q",
        divided=f"(v - m) / sqrtf(t / {{n}} + {_EPS})",
        hoisted=(f"float q = 1.0f / sqrtf(t / {{n}} + {_EPS});",),
    ),
    "rms_norm": Recipe(
        passes=(_sum("v * v"),),
        result="v * q",
        divided=f"v / sqrtf(s / {{n}} + {_EPS})",
        hoisted=(f"float q = 1.0f / sqrtf(s / {{n}} + {_EPS});",),
    ),
    "l2_normalize": Recipe(
        passes=(_sum("v * v"),),
        result="v * q",
        divided="v / fmaxf(sqrtf(s), 1e-12f)",
        hoisted=("float q = 1.0f / fmaxf(sqrtf(s), 1e-12f);",),
    ),
    "l1_normalize": Recipe(
        passes=(_sum("fabsf(v)"),),
        result="v * q",
        divided="v / fmaxf(s, 1e-12f)",
        hoisted=("float q = 1.0f / fmaxf(s, 1e-12f);",),
    ),
    "center": Recipe(
        passes=(_sum("v"),), result="v - q", divided="v - s / {n}", hoisted=("float q = s / {n};",)
    ),
    "max_shift": Recipe(passes=(_MAX,), result="v - m"),
}

REDUCTIONS: dict[str, Recipe] = {
    "sum": Recipe(passes=(_sum("v"),), result="s"),
    "mean": Recipe(passes=(_sum("v"),), result="s / {n}"),
    "amax": Recipe(passes=(_MAX,), result="m"),
    "amin": Recipe(passes=(_MIN,), result="m"),
    "l2": Recipe(passes=(_sum("v * v"),), result="sqrtf(s)"),
    "var": Recipe(
        passes=(_sum("v", "float m = s / {n};"), _sum("(v - m) * (v - m)", name="t")), result="t / {n}"
    ),
    "logsumexp": Recipe(passes=(_MAX, _EXP), result="m + logf(s)"),
}

# One pass over the row in place of two. layer_norm: E[v^2] - E[v]^2. softmax: inputs here are far below where
# expf overflows.
_ONE_PASS_NORMS: dict[str, Recipe] = {
    "softmax": Recipe(passes=(_sum("expf(v)"),), result="expf(v) * q", hoisted=("float q = 1.0f / s;",)),
    "log_softmax": Recipe(passes=(_sum("expf(v)"),), result="v - q", hoisted=("float q = logf(s);",)),
}


@dataclass(frozen=True, kw_only=True)
class _Schedule:
    intent: str
    techniques: tuple[str, ...] = ()
    outer: str | None = None
    inner: bool = False  # simd, with a reduction clause where there is one
    cached: bool = False  # the first pass leaves its values in out
    divided: bool = False
    threads_inside: bool = False


_SCHEDULES = (
    _Schedule(intent="slow", divided=True),
    _Schedule(intent="slow"),
    _Schedule(intent="good", techniques=("simd",), inner=True),
    _Schedule(intent="slow", techniques=("parallel",), outer="parallel for"),
    _Schedule(intent="slow", techniques=("parallel",), outer="parallel for", divided=True),
    _Schedule(intent="good", techniques=("parallel", "simd"), outer="parallel for", inner=True),
    _Schedule(intent="slow", techniques=("parallel", "simd"), outer="parallel for", inner=True, divided=True),
    _Schedule(
        intent="good",
        techniques=("parallel", "simd", "dynamic_schedule"),
        outer="parallel for schedule(dynamic)",
        inner=True,
    ),
    _Schedule(intent="slow", techniques=("inner_parallel", "simd"), inner=True, threads_inside=True),
    _Schedule(
        intent="good",
        techniques=("parallel", "simd", "cached_row"),
        outer="parallel for",
        inner=True,
        cached=True,
    ),
    _Schedule(intent="good", techniques=("simd", "cached_row"), inner=True, cached=True),
    _Schedule(intent="slow", techniques=("parallel", "cached_row"), outer="parallel for", cached=True),
)


def reduce_variants(task: Task) -> list[Variant]:
    """Good and slow kernels of a task of kind `reduce`."""
    spec = spec_of(task)
    found = [
        _reduce(task, schedule) for schedule in _SCHEDULES if not schedule.cached and not schedule.divided
    ]
    if spec.cols % _LANES == 0 and len(REDUCTIONS[spec.split()[1].fn].passes) == 1:
        found += [
            _reduce_lanes(task, "parallel for", "simd", "good", "parallel", "simd", "multi_accumulator"),
            _reduce_lanes(task, None, "simd", "good", "simd", "multi_accumulator"),
            _reduce_lanes(task, "parallel for", None, "slow", "parallel", "multi_accumulator"),
        ]
    if spec.split()[0]:
        found += [_reduce_separate(task, False), _reduce_separate(task, True)]
    return found


def norm_variants(task: Task) -> list[Variant]:
    """Good and slow kernels of a task of kind `norm`."""
    spec = spec_of(task)
    pre, norm, post = spec.split()
    recipe = NORMS[norm.fn]
    found = []
    for schedule in _SCHEDULES:
        if schedule.divided and recipe.divided is None:
            continue
        if schedule.cached and not pre:
            continue  # nothing computed that would be worth keeping
        found.append(_norm(task, schedule, recipe))
    if norm.fn == "softmax":
        found += [
            _softmax_kept(task, parallel, simd)
            for parallel, simd in ((True, True), (False, True), (True, False))
        ]
    if norm.fn in _ONE_PASS_NORMS:
        for schedule in _SCHEDULES:
            if schedule.intent == "good" and not schedule.cached:
                found.append(_norm(task, schedule, _ONE_PASS_NORMS[norm.fn], "one_pass"))
        found.append(_online(task))
    if norm.fn == "layer_norm":
        found += [_layer_norm_one_pass(task, parallel) for parallel in (True, False)]
    if pre or post:
        found += [_norm_separate(task, False), _norm_separate(task, True)]
    return found


def _simd(use: bool, clause: str = "", threads: bool = False) -> str | None:
    if not use:
        return None
    return f"{'parallel for ' if threads else ''}simd {clause}".rstrip()


def row_access(column: str = "j") -> Access:
    """Elements of the row that starts at r."""
    return Access(column=column, flat=f"r + {column}")


def _start(task: Task, outer: str | None) -> Code:
    return Code(task).loop("i", "x_d0", outer).add("long r = i * x_d1;")


def _loads(code: Code, pre: tuple[MapStage, ...], source: str = "x") -> None:
    code.add(f"float v = {source}[r + j];", *statements(pre, row_access()))


def _passes(code: Code, pre: tuple[MapStage, ...], stage: Stage, recipe: Recipe, schedule: _Schedule) -> str:
    """Write a recipe's passes; the answer is where the values now are: `x` (to be mapped again) or `out`."""
    source = "x"
    for step in recipe.passes:
        code.add(f"float {step.name} = {step.init};")
        pragma = _simd(schedule.inner, f"reduction({step.clause}:{step.name})", schedule.threads_inside)
        code.loop("j", "x_d1", pragma)
        _loads(code, pre if source == "x" else (), source)
        if schedule.cached and source == "x":
            code.add("out[r + j] = v;")
        code.add(mark(stage) + step.fold()).close().add(*(line.format(n="x_d1") for line in step.after))
        if schedule.cached:
            source = "out"
    return source


def _norm(task: Task, schedule: _Schedule, recipe: Recipe, *techniques: str) -> Variant:
    pre, norm, post = spec_of(task).split()
    code = _start(task, schedule.outer)
    source = _passes(code, pre, norm, recipe, schedule)
    if not schedule.divided:
        code.add(*(line.format(n="x_d1") for line in recipe.hoisted))
    result = recipe.divided if schedule.divided and recipe.divided else recipe.result
    code.loop("j", "x_d1", _simd(schedule.inner, threads=schedule.threads_inside))
    _loads(code, pre if source == "x" else (), source)
    code.add(f"{mark(norm)}v = {result.format(n='x_d1')};", *statements(post, row_access()), "out[r + j] = v;")
    hoisted = "hoisted" if recipe.hoisted and not schedule.divided else None
    return variant(
        code, schedule.intent, *schedule.techniques, hoisted, "fused" if pre or post else None, *techniques
    )


def _softmax_kept(task: Task, parallel: bool, simd: bool) -> Variant:
    """Exponentials are computed once and kept in out."""
    pre, norm, post = spec_of(task).split()
    code = (
        _start(task, "parallel for" if parallel else None)
        .add(f"float m = {_LOW};")
        .loop("j", "x_d1", _simd(simd, "reduction(max:m)"))
    )
    _loads(code, pre)
    if pre:
        code.add("out[r + j] = v;")
    code.add(f"{mark(norm)}m = fmaxf(m, v);").close().add("float s = 0.0f;").loop(
        "j", "x_d1", _simd(simd, "reduction(+:s)")
    )
    _loads(code, (), "out" if pre else "x")
    code.add(f"{mark(norm)}v = expf(v - m);", "s += v;", "out[r + j] = v;").close().add("float q = 1.0f / s;").loop(
        "j", "x_d1", _simd(simd)
    )
    code.add("float v = out[r + j];", f"{mark(norm)}v = v * q;", *statements(post, row_access()), "out[r + j] = v;")
    names = ("parallel" if parallel else None, "simd" if simd else None, "fused" if pre or post else None)
    return variant(code, "good" if simd else "slow", *names, "cached_row", "hoisted")


def _online(task: Task) -> Variant:
    """Maximum and sum in one sweep, the sum rescaled whenever the maximum grows."""
    pre, norm, post = spec_of(task).split()
    code = _start(task, "parallel for").add(f"float m = {_LOW};", "float s = 0.0f;").loop("j", "x_d1")
    _loads(code, pre)
    code.add(f"{mark(norm)}float n = fmaxf(m, v);", "s = s * expf(m - n) + expf(v - n);", "m = n;").close()
    code.add(*NORMS[norm.fn].hoisted).loop("j", "x_d1", "simd")
    _loads(code, pre)
    code.add(f"{mark(norm)}v = {NORMS[norm.fn].result};", *statements(post, row_access()), "out[r + j] = v;")
    return variant(code, "slow", "parallel", "online", "hoisted", "fused" if pre or post else None)


def _layer_norm_one_pass(task: Task, parallel: bool) -> Variant:
    pre, norm, post = spec_of(task).split()
    code = _start(task, "parallel for" if parallel else None).add("float s = 0.0f;", "float t = 0.0f;")
    code.loop("j", "x_d1", "simd reduction(+:s, t)")
    _loads(code, pre)
    code.add(f"{mark(norm)}s += v;", "t += v * v;").close().add(
        "float m = s / x_d1;", f"float q = 1.0f / sqrtf(t / x_d1 - m * m + {_EPS});"
    )
    code.loop("j", "x_d1", "simd")
    _loads(code, pre)
    code.add(f"{mark(norm)}v = (v - m) * q;", *statements(post, row_access()), "out[r + j] = v;")
    names = ("parallel" if parallel else None, "fused" if pre or post else None)
    return variant(code, "good", *names, "simd", "one_pass", "hoisted")


def _norm_separate(task: Task, fast: bool) -> Variant:
    """Maps before and after as passes of their own over the whole matrix."""
    pre, norm, post = spec_of(task).split()
    outer, inner = ("parallel for", "simd") if fast else (None, None)
    code = Code(task)
    source = "x"
    if pre:
        code.loop("i", "x_d0", outer).add("long r = i * x_d1;").loop("j", "x_d1", inner)
        _loads(code, pre)
        code.add("out[r + j] = v;").close(2)
        source = "out"
    recipe = NORMS[norm.fn]
    code.loop("i", "x_d0", outer).add("long r = i * x_d1;")
    for step in recipe.passes:
        code.add(f"float {step.name} = {step.init};").loop(
            "j", "x_d1", _simd(fast, f"reduction({step.clause}:{step.name})")
        )
        _loads(code, (), source)
        code.add(mark(norm) + step.fold()).close().add(*(line.format(n="x_d1") for line in step.after))
    code.add(*(line.format(n="x_d1") for line in recipe.hoisted)).loop("j", "x_d1", inner)
    _loads(code, (), source)
    code.add(f"{mark(norm)}v = {recipe.result.format(n='x_d1')};", "out[r + j] = v;").close(2)
    if post:
        code.loop("i", "x_d0", outer).add("long r = i * x_d1;").loop("j", "x_d1", inner)
        _loads(code, post, "out")
        code.add("out[r + j] = v;")
    names = ("parallel", "simd") if fast else ()
    return variant(code, "slow", "separate_passes", *names, "hoisted" if recipe.hoisted else None)


def _finish(code: Code, stage: Stage, recipe: Recipe, post: tuple[MapStage, ...]) -> None:
    code.add(
        f"{mark(stage)}float v = {recipe.result.format(n='x_d1')};",
        *statements(post, Access(column="0", flat="i")),
        "out[i] = v;",
    )


def _reduce(task: Task, schedule: _Schedule) -> Variant:
    pre, reduction, post = spec_of(task).split()
    recipe = REDUCTIONS[reduction.fn]
    code = _start(task, schedule.outer)
    _passes(code, pre, reduction, recipe, schedule)
    _finish(code, reduction, recipe, post)
    return variant(code, schedule.intent, *schedule.techniques, "fused" if pre or post else None)


def _reduce_lanes(task: Task, outer: str | None, inner: str | None, intent: str, *techniques: str) -> Variant:
    """Sixteen accumulators, folded at the end of the row."""
    pre, reduction, post = spec_of(task).split()
    recipe = REDUCTIONS[reduction.fn]
    (step,) = recipe.passes
    code = _start(task, outer).add(
        f"float t[{_LANES}];", f"for (long k = 0; k < {_LANES}; ++k) t[k] = {step.init};"
    )
    code.loop("j", "x_d1", step=_LANES).loop("k", str(_LANES), inner).add(
        "long c = j + k;", "float v = x[r + c];"
    )
    code.add(*statements(pre, row_access("c")), mark(reduction) + step.fold("t[k]")).close(2)
    code.add(
        f"float {step.name} = {step.init};", f"for (long k = 0; k < {_LANES}; ++k) {step.fold(value='t[k]')}"
    )
    _finish(code, reduction, recipe, post)
    return variant(code, intent, *techniques, "fused" if pre or post else None)


def _reduce_separate(task: Task, fast: bool) -> Variant:
    """The maps write a whole temporary matrix, which is then reduced."""
    pre, reduction, post = spec_of(task).split()
    recipe = REDUCTIONS[reduction.fn]
    outer, inner = ("parallel for", "simd") if fast else (None, None)
    code = (
        Code(task)
        .add("static float a[x_n];")
        .loop("i", "x_d0", outer)
        .add("long r = i * x_d1;")
        .loop("j", "x_d1", inner)
    )
    _loads(code, pre)
    code.add("a[r + j] = v;").close(2).loop("i", "x_d0", outer).add("long r = i * x_d1;")
    for step in recipe.passes:
        code.add(f"float {step.name} = {step.init};").loop(
            "j", "x_d1", _simd(fast, f"reduction({step.clause}:{step.name})")
        )
        _loads(code, (), "a")
        code.add(mark(reduction) + step.fold()).close().add(*(line.format(n="x_d1") for line in step.after))
    _finish(code, reduction, recipe, post)
    return variant(code, "slow", "separate_passes", *(("parallel", "simd") if fast else ()))
