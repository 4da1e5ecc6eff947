"""Which parts of CUB a source uses, so that `#include <cub/cub.cuh>` need not parse all of it.

The umbrella header takes nvcc nine seconds, one block-wide primitive's own four. The lean road puts a header of its own in the place of
the umbrella's; it includes the parts that are asked for by macros, and the whole where there are none. Which parts a source needs is told
from the names of CUB's that it has, and only where all of them are known here; what does not compile so is tried again with the whole.
"""

from __future__ import annotations

import re

UMBRELLA = "cub/cub.cuh"
_PARTS = {
    "cub/block/block_reduce.cuh": r"BlockReduce|BlockReduceAlgorithm|BLOCK_REDUCE_\w+",
    "cub/block/block_scan.cuh": r"BlockScan|BlockScanAlgorithm|BLOCK_SCAN_\w+",
    "cub/block/block_load.cuh": r"BlockLoad|BlockLoadAlgorithm|BLOCK_LOAD_\w+|LoadDirect\w+",
    "cub/block/block_store.cuh": r"BlockStore|BlockStoreAlgorithm|BLOCK_STORE_\w+|StoreDirect\w+",
    "cub/block/block_radix_sort.cuh": r"BlockRadixSort",
    "cub/block/block_exchange.cuh": r"BlockExchange",
    "cub/warp/warp_reduce.cuh": r"WarpReduce",
    "cub/warp/warp_scan.cuh": r"WarpScan",
    "cub/device/device_reduce.cuh": r"DeviceReduce",
    "cub/device/device_scan.cuh": r"DeviceScan",
    "cub/device/device_segmented_reduce.cuh": r"DeviceSegmentedReduce",
    "cub/thread/thread_operators.cuh": r"Arg(?:Max|Min)|Equality|Inequality",
    "cub/util_type.cuh": r"KeyValuePair|CubVector|NullType",
}
_UMBRELLA = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"]cub/cub\.cuh[>\"]", re.MULTILINE)
_NAMES = re.compile(r"\bcub[ \t]*::[ \t]*(\w+)")
_UNTOLD = re.compile(r"\busing\s+namespace\s+(?:::)?\s*cub\b|\bnamespace\s+\w+\s*=\s*(?:::)?\s*cub\b|(?<!::)\b(?:thrust|cuda)\s*::|\bCUB_\w+")
"""Names of CUB's may come without its own before them, or from what its umbrella brings along."""


def cub_parts(text: str) -> tuple[str, ...]:
    """The headers that stand for the umbrella's in `text`; empty where it is not included or the whole is needed."""
    if not _UMBRELLA.search(text) or _UNTOLD.search(text):
        return ()
    names = set(_NAMES.findall(text))
    needed = [header for header, pattern in _PARTS.items() if any(re.fullmatch(pattern, name) for name in names)]
    known = all(any(re.fullmatch(pattern, name) for pattern in _PARTS.values()) for name in names)
    return tuple(needed) if names and known else ()


def macro(header: str) -> str:
    """The macro that asks for a part."""
    return "SANDBOX_" + re.sub(r"\W", "_", header.removesuffix(".cuh")).upper()


def umbrella() -> str:
    """The header that stands in the place of the umbrella's."""
    parts = [line for header in _PARTS for line in (f"#ifdef {macro(header)}", f"#include <{header}>", "#endif")]
    return "\n".join(["#ifdef SANDBOX_CUB_PARTS", *parts, "#else", f"#include_next <{UMBRELLA}>", "#endif", ""])
