"""Meshes as they are written on a command line. (Imported before JAX is, so this imports none of it.)"""

from __future__ import annotations

AXES = ("data", "fsdp", "tensor")


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes of the axes from "data=1,fsdp=8,tensor=1"; an axis that is not named is 1.

    Raises:
      ValueError: anything else.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"--mesh={text}: {part!r} is no axis with its size; write data=1,fsdp=8,tensor=1, each axis once")
        sizes[name] = int(size)
    return {name: sizes.get(name, 1) for name in AXES}
