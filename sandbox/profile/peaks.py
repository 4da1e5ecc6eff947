"""What cards compute at best, by their names, and what that leaves of a timing.

Dense peaks of NVIDIA's data sheets, in TFLOP/s at boost clocks, without sparsity: FP32 of the ordinary cores (PyTorch's products in float32
use them unless told otherwise), FP16 and BF16 of the tensor cores, accumulated in FP32. Sources: the data sheets "H200 Tensor Core GPU"
(2024), "H100 Tensor Core GPU" (2023), "A100 Tensor Core GPU" (2021), "A30", "L40S", "L4", "A10", "A40", "L40", "RTX A6000".
A card that is not in the table has no peak here, nor has a part of one (MIG): nothing is made up.
"""

from __future__ import annotations

from sandbox.protocol import DType, Roofline

_TFLOPS: tuple[tuple[tuple[str, ...], float, float], ...] = (
    (("H100", "PCIe"), 51.0, 756.0),
    (("H100", "NVL"), 60.0, 835.0),
    (("H100",), 67.0, 989.0),
    (("H200", "NVL"), 60.0, 835.0),
    (("H200",), 67.0, 989.0),
    (("GH200",), 67.0, 989.0),
    (("H800", "PCIe"), 51.0, 756.0),
    (("H800",), 67.0, 989.0),
    (("A100",), 19.5, 312.0),
    (("A800",), 19.5, 312.0),
    (("A30",), 10.3, 165.0),
    (("A10",), 31.2, 125.0),
    (("A40",), 37.4, 149.7),
    (("L40S",), 91.6, 362.0),
    (("L40",), 90.5, 181.0),
    (("L4",), 30.3, 121.0),
    (("RTX", "A6000"), 38.7, 154.8),
)
"""Words of a card's name, FP32, FP16 and BF16; the first row whose words are all there is taken."""


def peak_flops(card: str, dtype: DType) -> float | None:
    """Operations a second that a card reaches at most in a data type; None for a card that is not known."""
    words = card.replace("-", " ").split()
    if "MIG" in words:
        return None
    for wanted, fp32, half in _TFLOPS:
        if all(word in words for word in wanted):
            return 1e12 * (fp32 if dtype == "float32" else half)
    return None


def roofline(*, n_bytes: float, flops: float, ms: float, bytes_per_s: float, peak: float | None) -> Roofline | None:
    """How near a time comes to the card's best.

    Args:
      n_bytes, flops: that a call must move, and compute.
      ms: of a call.
      bytes_per_s: speed of the card's memory.
      peak: operations a second, None where that is not known.

    Returns:
      None where there is nothing to move nor to compute.
    """
    memory_ms = 1e3 * n_bytes / bytes_per_s
    compute_ms = 1e3 * flops / peak if peak else 0.0
    floor_ms = max(memory_ms, compute_ms)
    if floor_ms <= 0 or ms <= 0:
        return None
    known = peak is not None or not flops
    bound = ("memory" if memory_ms >= compute_ms else "compute") if known else "unknown"
    return Roofline(bytes=n_bytes, flops=flops, floor_ms=floor_ms, share=floor_ms / ms, bound=bound)
