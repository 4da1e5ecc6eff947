"""What can be counted without running anything: bytes on a device, FLOPs of a traced function, traffic of a compiled one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(")
_CALLED = re.compile(r"(?:body|to_apply|calls|branch_computations)=\{?%?([\w.\-]+(?:, ?%?[\w.\-]+)*)\}?")
_TRIPS = re.compile(r'known_trip_count[^0-9]*"?(\d+)')
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


def bytes_per_device(tree: Any) -> int:
    """Bytes that a tree of arrays, or of `jax.ShapeDtypeStruct`s with shardings, takes on each device."""

    def one(leaf) -> int:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(one(leaf) for leaf in jax.tree.leaves(tree))


def product_flops(jaxpr: Any) -> tuple[int, int]:
    """FLOPs of all matrix products in a traced function, repetitions of its scans included: those without and those with batch axes.

    In a backbone the ones with batch axes are attention's. 2 m n k for an m x k by k x n product.

    Args:
      jaxpr: of `jax.make_jaxpr` or a traced function's `.jaxpr`.

    Raises:
      ValueError: a product in a loop of unknown length.
    """
    plain = batched = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), (batch, _) = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            flops = 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
            plain, batched = (plain, batched + flops) if batch else (plain + flops, batched)
            continue
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for inner in _inner(equation.params):
            a, b = product_flops(inner)
            if equation.primitive.name == "while" and a + b:
                raise ValueError("product_flops: a matrix product stands in a loop of unknown length")
            plain, batched = plain + times * a, batched + times * b
    return plain, batched


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for found in value if isinstance(value, tuple | list) else (value,):
            if hasattr(found, "eqns") or hasattr(getattr(found, "jaxpr", None), "eqns"):
                yield found


def collective_bytes(hlo: str) -> dict[tuple[str, int], int]:
    """Bytes that each device sends in one run of a compiled program, by kind of collective and by extent.

    Of a result of S bytes over n devices a ring sends S (n-1)/n to gather it and twice that to reduce it everywhere; a reduce-scatter
    sends n-1 times its result. Loops count as often as they run. The extent is how many neighbours, in the order of their numbers, hold
    a whole group: 8 for the devices 0 to 7 and for 0 and 7 alike.

    Args:
      hlo: `compiled.as_text()`.
    """
    computations: dict[str, list[str]] = {}
    entry, current = "", None
    for line in hlo.splitlines():
        if (found := _COMPUTATION.match(line)) and not line.startswith(" "):
            current = computations.setdefault(found[1], [])
            entry = found[1] if line.startswith("ENTRY") else entry
        elif current is not None:
            current.append(line)
    totals: dict[tuple[str, int], int] = {}

    def walk(name: str, times: int) -> None:
        for line in computations.get(name, ()):
            found = _INSTRUCTION.match(line)
            if not found:
                continue
            kind = found[2].removesuffix("-start")
            if kind in _COLLECTIVES:
                devices, extent = _group(line)
                totals[kind, extent] = totals.get((kind, extent), 0) + times * _sent(kind, _bytes(found[1]), devices)
                continue
            trips = _TRIPS.search(line)
            again = int(trips[1]) if kind == "while" and trips else 1
            if kind in ("while", "call", "conditional", "fusion"):
                for names in _CALLED.findall(line):
                    for inner in names.split(","):
                        walk(inner.strip().lstrip("%"), times * again)

    walk(entry, 1)
    return {key: size for key, size in totals.items() if size}


def _sent(kind: str, size: int, devices: int) -> int:
    if devices < 2:
        return 0
    if kind == "reduce-scatter":
        return size * (devices - 1)
    share = size * (devices - 1) // devices
    return 2 * share if kind == "all-reduce" else size if kind == "collective-permute" else share


def _bytes(shapes: str) -> int:
    return sum(
        _SIZES.get(kind, 4) * math.prod(int(n) for n in sizes.split(",") if n) for kind, sizes in _SHAPE.findall(shapes) if kind in _SIZES
    )


def _group(line: str) -> tuple[int, int]:
    """(devices that a collective joins, their extent), of the ways in which HLO says it.

    Raises:
      ValueError: another way.
    """
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(\[([\d,]*)\](?:T\(([\d,]*)\))?\))? ?\{([^}]*)\}", line):
        names, shape = zip(*((name.strip("'\" "), int(size)) for name, size in (part.split("=") for part in found[1].split(","))), strict=True)
        ids, joined = _ids(found[2], found[3], math.prod(shape)), []
        split: list[int] = []
        asked = dict(re.findall(r"'([\w.]+)'(?::\((\d+)\)(?:\d+))?", found[4]))
        sizes = dict(re.findall(r"'([\w.]+)':\(\d+\)(\d+)", found[4]))
        for name, size in zip(names, shape, strict=True):
            if name in asked and asked[name]:  # a part of an axis: what stands before it, itself, the rest
                joined.append(len(split) + 1)
                split += [int(asked[name]), int(sizes[name]), size // (int(asked[name]) * int(sizes[name]))]
            else:
                joined += [len(split)] if name in asked else []
                split.append(size)
        ids = np.moveaxis(ids.reshape(split), joined, range(len(joined)))
        members = ids.reshape(math.prod(split[axis] for axis in joined), -1)[:, 0]
    elif found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?", line):
        members = _ids(found[3], found[4], 0).reshape(int(found[1]), int(found[2]))[0]
    elif found := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        members = np.array([int(member) for member in found[1].split(",")])
    elif pairs := re.findall(r"(\d+),(\d+)\}", line.partition("source_target_pairs=")[2].partition("}}")[0] + "}"):
        return 2, max(abs(int(a) - int(b)) for a, b in pairs) + 1
    else:
        raise ValueError(f"collective_bytes: it is not known how to read which devices this joins: {line.strip()[:300]}")
    return len(members), int(members.max() - members.min()) + 1


def _ids(shape: str | None, order: str | None, count: int) -> np.ndarray:
    """Device numbers, perhaps laid out in a shape whose axes are then put in another order."""
    if not shape:
        return np.arange(count)
    sizes = [int(n) for n in shape.split(",")]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose([int(n) for n in order.split(",")]) if order else ids
