"""Triton modules in which a row never leaves registers: several normalisations of it, or one and a reduction, or a product and its norm."""

from __future__ import annotations

import dataclasses

from dk_jax.sft.cpp_ops import Variant
from dk_jax.sft.triton_matmul import rows_normalised
from dk_jax.sft.triton_ops import Code, Module, Place, load
from dk_jax.sft.triton_plan import Segment, plan
from dk_jax.sft.triton_recipes import NORMS, REDUCTIONS, Recipe
from dk_jax.sft.triton_rows import TILE, in_tile, launch_tiles
from dk_jax.tasks.spec import OpSpec, RowNorm, RowReduce, Stage, is_map
from dk_jax.tasks.task import Task

_ROWS_OF = "axis=1, keep_dims=True"
_REDUCED = Place(flat="i", column="i")


def row_pipelines(task: Task, spec: OpSpec) -> list[Variant]:
    """Modules of one kernel for a pipeline of two or more normalisations, or of normalisations and a reduction; [] for any other."""
    segment = _whole(spec)
    if segment is None or not in_tile(segment):
        return []
    found = []
    for height, warps in ((2, 8), (4, 8), (1, 4)):
        module = Module(task)
        launch_tiles(module, segment, _code(segment), height, warps)
        techniques = {"fused", "row_pipeline", "row_in_registers"} | ({"many_rows", "many_warps"} if height > 1 else set())
        found.append(Variant(source=module.text(), techniques=frozenset(techniques), intent="good"))
    return found


def product_rows(task: Task, spec: OpSpec) -> list[Variant]:
    """Modules of one kernel for a matrix product whose short rows are normalised; [] for any other pipeline."""
    segments = plan(spec)
    if [segment.kind for segment in segments] != ["matmul", "norm"] or segments[1].before or segments[1].widths[-1] > 128:
        return []
    product = dataclasses.replace(segments[0], expressions=segments[1].expressions)
    found = []
    for bm, warps in ((64, 4), (128, 8)):
        module = Module(task)
        rows_normalised(module, product, segments[1].core, segments[1].after, bm=bm, warps=warps)
        techniques = {"fused", "row_pipeline", "tiled", "large_tiles", "tf32x3"} | ({"many_warps"} if warps > 4 else set())
        found.append(Variant(source=module.text(), techniques=frozenset(techniques), intent="good"))
    return found


def _whole(spec: OpSpec) -> Segment | None:
    """All stages as one segment whose core is the last that is not elementwise; None where they are of other kinds, or just one is."""
    at = [index for index, stage in enumerate(spec.stages) if not is_map(stage)]
    cores = [spec.stages[index] for index in at]
    if len(cores) < 2 or not all(isinstance(core, RowNorm) for core in cores[:-1]) or not isinstance(cores[-1], RowNorm | RowReduce):
        return None
    return Segment(
        before=spec.stages[: at[-1]],
        core=cores[-1],
        after=spec.stages[at[-1] + 1 :],
        in_shape=(spec.rows, spec.cols),
        widths=(spec.cols,),
        out_shape=spec.out_shape,
        source="x",
        target="out",
        expressions={argument.name: argument.name for argument in spec.arguments},
    )


def _code(segment: Segment) -> Code:
    code = Code().add("row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)", "j = tl.arange(0, BLOCK)")
    code.add("mask = (row[:, None] < rows) & (j[None, :] < cols)", "i = row[:, None] * cols + j[None, :]", f"v = {load('x', 'i', 'mask')}")
    for stage in (*segment.before, segment.core):
        if is_map(stage):
            code.maps([stage], TILE)
            continue
        recipe = _recipe(stage)
        code.add(f"v = tl.where(mask, v, {recipe.neutral})")
        code.add(*(line.format(n="cols", axis=_ROWS_OF) for line in recipe.whole))
    if isinstance(segment.core, RowReduce):
        code.add("i = row[:, None]", "mask = i < rows").maps(segment.after, _REDUCED)
    else:
        code.maps(segment.after, TILE)
    return code.add("tl.store(out_ptr + i, v, mask=mask)")


def _recipe(stage: Stage | None) -> Recipe:
    assert isinstance(stage, RowNorm | RowReduce)
    return (NORMS if isinstance(stage, RowNorm) else REDUCTIONS)[stage.fn]
