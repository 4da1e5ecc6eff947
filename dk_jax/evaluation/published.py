"""What other systems have published of themselves on KernelBench: for orientation beside one's own figures, never measured here.

Other hardware, other judges and, where said, another selection of the kernel that counts. Fast_p there is of at least p times the speed of
PyTorch eager, here above p.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A system's shares by threshold p and level, over PyTorch eager.

    Attributes:
        name, source: of the system and of the paper.
        protocol: which kernel of a task counts.
        fast: Fast_p as a share, by p ("1", "1.2", ...) and level.
    """

    name: str
    source: str
    protocol: str
    fast: Mapping[str, Mapping[int, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overall:
    """A system of which no Fast_p by level is known here: what it says of itself in one line."""

    name: str
    source: str
    said: str


def _by_level(*percent: float) -> dict[int, float]:
    return {level: share / 100 for level, share in enumerate(percent, 1)}


LAST = "last of 3 turns, 8 samples"
DAVINCI, DR_KERNEL = "arXiv 2606.16497", "arXiv 2602.05885"
PUBLISHED = (
    Published(
        name="daVinci-kernel 14B", source=DAVINCI, protocol=LAST,
        fast={"1": _by_level(37.2, 70.6, 32.2), "1.2": {2: 0.271, 3: 0.073}},
    ),
    Published(
        name="daVinci-kernel 8B", source=DAVINCI, protocol=LAST,
        fast={"1": _by_level(26.1, 44.8, 10.1), "1.2": {2: 0.221}, "1.5": {3: 0.020}, "2": {2: 0.079}},
    ),
    Published(
        name="Dr.Kernel 14B (re-run)", source=f"{DAVINCI}, who ran it again", protocol=LAST,
        fast={"1": _by_level(30.4, 58.5, 22.1), "1.2": {3: 0.028}},
    ),
    Published(
        name="Dr.Kernel 14B", source=DR_KERNEL, protocol="last turn",
        fast={"1": _by_level(20.3, 49.2, 8.8), "1.2": _by_level(16.9, 25.6, 1.2), "1.5": _by_level(13.2, 7.4, 0.2), "2": _by_level(11.6, 2.1, 0.0)},
    ),
    Published(name="Dr.Kernel 14B, best turn", source=DR_KERNEL, protocol="test-time scaling, best turn", fast={"1": {2: 0.809}}),
)  # fmt: skip
OVERALL = (
    Overall(name="Kevin 32B", source="arXiv 2507.11948", said="82 % correct, 1.10 × in the mean, best of 16 (CUDA)"),
    Overall(name="CUDA Agent", source="arXiv 2602.24286", said="98.8 % pass, 2.11 × over torch.compile"),
    Overall(name="CudaForge", source="arXiv 2511.01884", said="97.6 % correct, 1.68 × in the mean, 10 rounds, about $0.30 a kernel"),
    Overall(name="EvoEngineer", source="arXiv 2510.03760", said="2.72 × in the median, or 69.8 % valid (not the same variant), 45 trials a kernel"),
)
