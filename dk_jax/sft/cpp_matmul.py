"""C++ kernels for a matrix product with an elementwise epilogue: loop order, tiles, packing, lanes and
threads."""

from __future__ import annotations

from dk_jax.sft.cpp_ops import Access, Code, Variant, spec_of, statements, variant
from dk_jax.tasks.spec import Linear, Matmul
from dk_jax.tasks.task import Task

_COLUMNS = 64
_ROWS = 4

_SCHEDULES: tuple[tuple[str | None, str | None, str, tuple[str, ...]], ...] = (
    (None, None, "slow", ()),
    (None, "simd", "good", ("simd",)),
    ("parallel for", None, "slow", ("parallel",)),
    ("parallel for", "simd", "good", ("parallel", "simd")),
)


def matmul_variants(task: Task) -> list[Variant]:
    """Good and slow kernels of a task of kind `matmul` whose product comes first.

    Raises:
      ValueError: the product does not come first; `cpp_blocks` writes such kernels.
    """
    spec = spec_of(task)
    pre, product, post = spec.split()
    if pre:
        raise ValueError(f"task {task.name!r} maps its input before the product: use block_variants")
    found = [_dot(task, *schedule) for schedule in _SCHEDULES]
    rights = [schedule for schedule in _SCHEDULES if schedule[1]]
    tiles = spec.out_shape[1] % _COLUMNS == 0
    if rows_of_weight(product):
        found += [_rows_added(task, False, *schedule) for schedule in _SCHEDULES]
    else:
        found += [_rows_added(task, True, *schedule) for schedule in rights]
    packed = not rows_of_weight(product)
    if tiles:
        found += [_column_tiles(task, packed, *schedule) for schedule in rights]
    if tiles and spec.rows % _ROWS == 0:
        found += [_register_tiles(task, packed, *schedule) for schedule in rights]
    if post:
        found += [_separate(task, *schedule) for schedule in (_SCHEDULES[0], _SCHEDULES[3])]
    return found


def rows_of_weight(product: Linear | Matmul) -> bool:
    """Whether the weight is stored [columns, width], so that a row of it is added at a time; else [width,
    columns]."""
    return isinstance(product, Matmul) and not product.transposed


def weight_of(product: Linear | Matmul) -> str:
    """C name of the weight."""
    return f"{product.name}_weight" if isinstance(product, Linear) else product.name


def bias_of(product: Linear | Matmul, j: str = "j") -> list[str]:
    """The statement that adds a linear layer's bias, if it has one."""
    return [f"v = v + {product.name}_bias[{j}];"] if isinstance(product, Linear) and product.bias else []


def _epilogue(code: Code, task: Task, value: str, flat: str = "o + j") -> Code:
    """value -> bias -> maps -> out, at column j."""
    _, product, post = spec_of(task).split()
    code.add(f"float v = {value};", *bias_of(product), *statements(post, Access(column="j", flat=flat)))
    return code.add(f"out[{flat}] = v;")


def _fused(task: Task) -> str | None:
    return "fused" if spec_of(task).split()[2] else None


def _rows(code: Code, outer: str | None) -> Code:
    return code.loop("i", "x_d0", outer).add("long r = i * x_d1;", "long o = i * out_d1;")


def _dot_value(code: Code, product: Linear | Matmul, inner: str | None) -> Code:
    weight = weight_of(product)
    element = f"{weight}[k * out_d1 + j]" if rows_of_weight(product) else f"{weight}[j * x_d1 + k]"
    code.add("float s = 0.0f;").loop("k", "x_d1", f"{inner} reduction(+:s)" if inner else None)
    return code.add(f"s += x[r + k] * {element};").close()


def _dot(
    task: Task, outer: str | None, inner: str | None, intent: str, techniques: tuple[str, ...]
) -> Variant:
    """Each element a scalar product."""
    product = spec_of(task).split()[1]
    code = _dot_value(_rows(Code(task), outer).loop("j", "out_d1"), product, inner)
    strided = "strided_access" if rows_of_weight(product) else None
    return variant(
        _epilogue(code, task, "s"), "slow" if strided else intent, strided, _fused(task), *techniques
    )


def _pack(code: Code, product: Linear | Matmul, packed: bool) -> str:
    """Write the weight's transpose to p if asked; the answer is the text of its row k, without the closing
    bracket."""
    weight = weight_of(product)
    if not packed:
        return f"{weight}[k * out_d1 + "
    code.add(f"static float p[{weight}_n];").loop("j", "out_d1", "parallel for").loop("k", "x_d1")
    code.add(f"p[k * out_d1 + j] = {weight}[j * x_d1 + k];").close(2)
    return "p[k * out_d1 + "


def _rows_added(
    task: Task, packed: bool, outer: str | None, inner: str | None, intent: str, techniques: tuple[str, ...]
) -> Variant:
    """A row of the result is a sum of rows of the weight."""
    product = spec_of(task).split()[1]
    code = Code(task)
    row = _pack(code, product, packed)
    _rows(code, outer).add("float t[out_d1] = {0.0f};").loop("k", "x_d1").add("float a = x[r + k];").loop(
        "j", "out_d1", inner
    )
    code.add(f"t[j] += a * {row}j];").close(2)
    _epilogue(code.loop("j", "out_d1", inner), task, "t[j]")
    return variant(code, intent, "loop_interchange", "packed" if packed else None, _fused(task), *techniques)


def _column_tiles(
    task: Task, packed: bool, outer: str | None, inner: str | None, intent: str, techniques: tuple[str, ...]
) -> Variant:
    """As above for a strip of columns whose accumulators stay in registers."""
    product = spec_of(task).split()[1]
    code = Code(task)
    row = _pack(code, product, packed)
    _rows(code, outer).loop("b", "out_d1", step=_COLUMNS).add(f"float t[{_COLUMNS}] = {{0.0f}};").loop(
        "k", "x_d1"
    )
    code.add("float a = x[r + k];").loop("c", str(_COLUMNS), inner).add(f"t[c] += a * {row}b + c];").close(2)
    code.loop("c", str(_COLUMNS), inner).add("long j = b + c;")
    names = ("loop_interchange", "register_tile", "packed" if packed else None)
    return variant(_epilogue(code, task, "t[c]"), intent, *names, _fused(task), *techniques)


def _register_tiles(
    task: Task, packed: bool, outer: str | None, inner: str | None, intent: str, techniques: tuple[str, ...]
) -> Variant:
    """Several rows share each piece of the weight that is loaded."""
    product = spec_of(task).split()[1]
    code = Code(task)
    row = _pack(code, product, packed)
    width = _COLUMNS // 2
    code.loop("i", "x_d0", outer, step=_ROWS).loop("b", "out_d1", step=width).add(
        f"float t[{_ROWS}][{width}] = {{0.0f}};"
    )
    code.loop("k", "x_d1").loop("q", str(_ROWS)).add("float a = x[(i + q) * x_d1 + k];").loop(
        "c", str(width), inner
    )
    code.add(f"t[q][c] += a * {row}b + c];").close(3).loop("q", str(_ROWS)).loop("c", str(width), inner)
    code.add("long j = b + c;", "long o = (i + q) * out_d1;")
    names = ("loop_interchange", "register_tile", "row_tile", "packed" if packed else None)
    return variant(_epilogue(code, task, "t[q][c]"), intent, *names, _fused(task), *techniques)


def _separate(
    task: Task, outer: str | None, inner: str | None, intent: str, techniques: tuple[str, ...]
) -> Variant:
    """The epilogue as a pass of its own."""
    product = spec_of(task).split()[1]
    code = _rows(Code(task), outer)
    if rows_of_weight(product) and inner:
        code.add("for (long j = 0; j < out_d1; ++j) out[o + j] = 0.0f;").loop("k", "x_d1").add(
            "float a = x[r + k];"
        )
        code.loop("j", "out_d1", inner).add(f"out[o + j] += a * {weight_of(product)}[k * out_d1 + j];").close(
            3
        )
    else:
        _dot_value(code.loop("j", "out_d1"), product, inner).add("out[o + j] = s;").close(2)
    code.loop("i", "x_d0", outer).add("long o = i * out_d1;").loop("j", "out_d1", inner)
    return variant(_epilogue(code, task, "out[o + j]"), "slow", "separate_passes", *techniques)
