"""More tasks from the same grammar, for the cold start: random pipelines, deterministic by seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection

from dk_jax.tasks.builtin import held_out_structures
from dk_jax.tasks.chains import Chain
from dk_jax.tasks.render import render_reference
from dk_jax.tasks.spec import (
    Branch,
    ColReduce,
    Cumsum,
    Linear,
    Matmul,
    OpSpec,
    RowNorm,
    RowReduce,
    Scalar,
    Stage,
    Tensor,
    Transpose,
    Unary,
    Vector,
    Window,
)
from dk_jax.tasks.task import Size, Task

_SAME_STRUCTURE = 4  # tasks of one composition, at most
_KIND_WEIGHTS = {
    "map": 34,
    "reduce": 18,
    "norm": 17,
    "column": 8,
    "matmul": 8,
    "window": 5,
    "transpose": 3,
    "scan": 3,
    "block": 4,
}
# rows, columns, and the least and the greatest number of elements
_SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int]] = {
    "small": ((32, 64, 128), (128, 256, 512), 1 << 12, 1 << 14),
    "light": ((128, 256, 512), (256, 512, 1024, 2048), 1 << 15, 1 << 16),
    "cpu": ((128, 256, 512, 1024, 2048), (256, 512, 1024, 2048), 1 << 18, 1 << 20),
    "gpu": ((1024, 2048, 4096, 8192), (1024, 2048, 4096), 1 << 22, 1 << 24),
}
_WIDTHS = {"small": (16, 32, 64), "light": (16, 32, 64), "cpu": (16, 32, 64, 128), "gpu": (256, 512, 1024)}
_MATRIX_ROWS = {"small": (64, 128), "light": (128, 256), "cpu": (1024, 2048), "gpu": (4096,)}
_NORMS = ("softmax", "layer_norm", "rms_norm") * 2 + (
    "log_softmax", "l2_normalize", "l1_normalize", "center", "max_shift"
)  # fmt: skip
_ACTIVATIONS = ("relu", "silu", "gelu", "tanh", "sigmoid", "leaky_relu")


def generate_tasks(
    seed: int, count: int, size: Size = "cpu", exclude: Collection[tuple] | None = None
) -> list[Task]:
    """Distinct train tasks; the first n of a longer list are the list of length n.

    Args:
      seed: fixes the list.
      count: how many.
      size: what the sizes are meant for (`Task.size`).
      exclude: structures (`OpSpec.structure`) never to be generated; by default those of the built-in held-
        out tasks.

    Raises:
      ValueError: `size` is unknown, or the grammar has run out of new tasks.
    """
    if size not in _SIZES:
        raise ValueError(f"size is {size!r}: give one of {', '.join(_SIZES)}")
    excluded = held_out_structures() if exclude is None else frozenset(exclude)
    rng = random.Random(f"tasks {seed} {size}")
    tasks: list[Task] = []
    specs: set[OpSpec] = set()
    structures: Counter[tuple] = Counter()
    for _ in range(200 * count + 1000):
        if len(tasks) == count:
            return tasks
        kind = rng.choices(list(_KIND_WEIGHTS), list(_KIND_WEIGHTS.values()))[0]
        spec = _GROW[kind](rng, size)
        if spec.structure in excluded or spec in specs or structures[spec.structure] == _SAME_STRUCTURE:
            continue
        specs.add(spec)
        structures[spec.structure] += 1
        slug = _slug(spec)
        name = f"generated_{slug}_{structures[spec.structure]}"
        reference = render_reference(spec, f"{slug.replace('_', ' ').capitalize()}.")
        tasks.append(
            Task(
                name=name,
                level=_level(spec),
                family=f"generated_{slug}",
                split="train",
                reference=reference,
                size=size,
                spec=spec,
            )
        )
    raise ValueError(
        f"only {len(tasks)} of {count} distinct tasks could be generated: ask for fewer, or use several seeds"
    )


def _dims(rng: random.Random, size: Size, most: int | None = None) -> tuple[int, int]:
    rows, cols, low, high = _SIZES[size]
    fits = [(r, c) for r in rows for c in cols if low <= r * c <= high and (most is None or c <= most)]
    return rng.choice(fits)


def _spec(chain: Chain, dims: tuple[int, int]) -> OpSpec:
    return OpSpec(rows=dims[0], cols=dims[1], stages=tuple(chain.stages))


def _grow_map(rng: random.Random, size: Size) -> OpSpec:
    chain = Chain(rng)
    chain.grow(rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5)))
    return _spec(chain, _dims(rng, size))


def _grow_reduce(rng: random.Random, size: Size) -> OpSpec:
    chain = Chain(rng)
    chain.grow(rng.choice((0, 1, 1, 2, 2, 3, 4)))
    fn = rng.choice(("sum", "sum", "mean", "amax", "amin", "l2", "var", "logsumexp"))
    if (fn == "logsumexp" and chain.bound > 30.0) or (fn in ("amax", "amin") and _flat(chain)):
        fn = "sum"
    chain.stages.append(RowReduce(fn=fn))
    if fn == "mean":
        chain.stages.append(Scalar(op="mul", value=rng.choice((2.0, 5.0, 10.0, 20.0))))
    elif rng.random() < 0.5:
        chain.stages.append(Scalar(op=rng.choice(("mul", "add")), value=rng.choice((0.5, 2.0, 3.0))))
    return _spec(chain, _dims(rng, size))


def _flat(chain: Chain) -> bool:
    """Whether extremes of the values may all be the same, such as the least of many values of a ReLU."""
    return any(isinstance(stage, Unary) and stage.fn != "leaky_relu" for stage in chain.stages)


def _grow_norm(rng: random.Random, size: Size) -> OpSpec:
    chain = Chain(rng)
    chain.grow(rng.choice((0, 0, 1, 1, 2, 3)))
    fn = rng.choice(_NORMS)
    if fn in ("softmax", "log_softmax") and chain.bound > 30.0:
        fn = "rms_norm"
    signed, span = chain.low < 0, chain.high - chain.low
    low, high = {
        "softmax": (0.0, 1.0),
        "log_softmax": (-7.6 - span, -5.5 + span),
        "layer_norm": (-6.0, 6.0),
        "center": (-span, span),
        "max_shift": (-span, 0.0),
        "rms_norm": (-6.0 if signed else 0.0, 6.0),
    }.get(fn, (-1.0 if signed else 0.0, 1.0))
    chain.take(RowNorm(fn=fn), low, high)
    if high == 1.0:  # values of about 1/columns: keep them well above the tolerance
        value = rng.choice((10.0, 20.0, 50.0, 100.0))
        chain.take(Scalar(op="mul", value=value), low * value, value)
        chain.grow(rng.choice((0, 0, 1)))
    else:
        chain.grow(rng.choice((0, 1, 1, 2, 2, 3)))
    return _spec(chain, _dims(rng, size, 4096 if size == "gpu" else 1024))


def _grow_column(rng: random.Random, size: Size) -> OpSpec:
    chain = Chain(rng)
    chain.grow(rng.choice((0, 1, 1, 2, 2, 3)))
    fn = rng.choice(("sum", "sum", "mean", "amax", "l2"))
    if fn == "amax" and _flat(chain):
        fn = "sum"
    chain.stages.append(ColReduce(fn=fn))
    if fn == "mean" or rng.random() < 0.5:
        chain.stages.append(
            Scalar(
                op="mul", value=rng.choice((2.0, 5.0, 10.0)) if fn == "mean" else rng.choice((0.1, 0.5, 2.0))
            )
        )
    return _spec(chain, _dims(rng, size))


def _grow_matmul(rng: random.Random, size: Size) -> OpSpec:
    chain = Chain(rng, -6.0, 6.0)
    width = rng.choice(_WIDTHS[size] if size == "gpu" else (64, 128, 256))
    if rng.random() < 0.5:
        chain.stages.append(Linear(name="fc", width=width, bias=rng.random() < 0.8))
    else:
        chain.stages.append(Matmul(name="w", width=width, transposed=rng.random() < 0.4, draw="small"))
    chain.grow(rng.choice((1, 2, 2, 3)))
    return _spec(chain, (rng.choice(_MATRIX_ROWS[size]), rng.choice(_WIDTHS[size][:3])))


def _grow_window(rng: random.Random, size: Size) -> OpSpec:
    chain = Chain(rng)
    chain.grow(rng.choice((0, 0, 1, 1, 2)))
    fn = rng.choice(("avg", "max", "conv", "conv"))
    if fn == "conv":
        width = rng.choice((3, 4, 5))
        spread = 2 * width * chain.bound
        chain.take(Window(fn=fn, size=width, name="w"), -spread, spread)
    else:
        width = rng.choice((2, 4, 8))
        chain.take(Window(fn=fn, size=width, stride=width), chain.low, chain.high)
    chain.grow(rng.choice((0, 1, 1, 2)))
    return _spec(chain, _dims(rng, size))


def _grow_transpose(rng: random.Random, size: Size) -> OpSpec:
    chain = Chain(rng)
    chain.grow(rng.choice((0, 1, 2)), columns=rng.random() < 0.5)
    chain.stages.append(Transpose())
    chain.grow(rng.choice((0, 1, 2)))
    return _spec(chain, _dims(rng, size, 4096 if size == "gpu" else 1024))


def _grow_scan(rng: random.Random, size: Size) -> OpSpec:
    chain = Chain(rng)
    chain.grow(rng.choice((0, 1, 1, 2)))
    if chain.bound > 8.0:  # long sums of large values of both signs would test rounding, not the kernel
        chain = Chain(rng)
    chain.stages += [Cumsum(), Scalar(op="mul", value=rng.choice((0.1, 0.2, 0.5)))]
    return _spec(chain, _dims(rng, size, 2048 if size == "gpu" else 512))


def _grow_block(rng: random.Random, size: Size) -> OpSpec:
    act = Unary(fn=rng.choice(_ACTIVATIONS[:-1]))
    norm = RowNorm(fn=rng.choice(("layer_norm", "rms_norm")))
    scale = Vector(op="mul", name="scale", draw="positive")
    d, f = rng.choice(_WIDTHS[size][:3]), rng.choice(_WIDTHS[size][:3])
    bodies: tuple[tuple[Stage, ...], ...] = (
        (Linear(name="fc1", width=f), act, Linear(name="fc2", width=d)),
        (norm, Linear(name="fc", width=f), act),
        (Linear(name="fc", width=f), act, norm, scale),
        (Branch(name="r"), Linear(name="fc", width=d), act, Tensor(op="add", name="r"), norm),
        (Branch(name="r"), norm, scale, act, Tensor(op="add", name="r")),
        (Matmul(name="w", width=f, draw="small"), act, RowNorm(fn="softmax"), Scalar(op="mul", value=10.0)),
        (norm, scale, act, RowReduce(fn="sum"), Scalar(op="mul", value=0.1)),
        (act, RowNorm(fn="softmax"), Tensor(op="mul", name="y"), RowReduce(fn="sum")),
    )
    at = rng.randrange(len(bodies))
    rows, cols = _dims(rng, size, 1024) if at in (4, 6, 7) else (rng.choice(_MATRIX_ROWS[size]), d)
    return OpSpec(rows=rows, cols=cols, stages=bodies[at])


_GROW: dict[str, Callable[[random.Random, Size], OpSpec]] = {
    "map": _grow_map,
    "reduce": _grow_reduce,
    "norm": _grow_norm,
    "column": _grow_column,
    "matmul": _grow_matmul,
    "window": _grow_window,
    "transpose": _grow_transpose,
    "scan": _grow_scan,
    "block": _grow_block,
}


def _level(spec: OpSpec) -> int:
    if spec.kind == "block":
        return 3
    return 1 if len(spec.stages) == 1 else 2


def _slug(spec: OpSpec) -> str:
    """A short name of a structure, e.g. `add_bias_relu_rowsum`; equal structures have equal names."""
    words: list[str] = []
    for part in spec.structure:
        words += _words(part)
    return "_".join(words)


def _words(part: tuple) -> list[str]:
    kind, *rest = part
    if kind == "unary":
        return rest[:1]
    if kind == "scalar":
        return [f"{rest[0]}c"]
    if kind == "vector":
        return [f"{rest[0]}v"]
    if kind in ("tensor", "branch"):
        op, fn, factor = rest
        return (
            [f"{op}{'t' if kind == 'tensor' else 'r'}"]
            + ([fn] if fn else [])
            + (["scaled"] if factor else [])
        )
    if kind == "RowReduce":
        return [f"row{rest[0]}"]
    if kind == "ColReduce":
        return [f"col{rest[0]}"]
    if kind == "RowNorm":
        return [rest[0].replace("_", "")]
    if kind == "Window":
        return [f"{rest[0]}pool" if rest[0] != "conv" else "conv"] + (
            ["dense"] if rest[1] and rest[0] != "conv" else []
        )
    if kind == "Linear":
        return ["linear"] if rest[0] else ["linearnobias"]
    if kind == "Matmul":
        return ["matmult"] if rest[0] else ["matmul"]
    return [kind.lower()]
