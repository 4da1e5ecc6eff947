"""Data sheets of cards, as CudaForge's Judge reads them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU. Rates are dense peaks at boost clock, without sparsity, as its vendor gives them.

    Attributes:
        multiprocessors: streaming multiprocessors.
        memory_gb, memory_gb_per_s, l2_mb: of the device.
        shared_kb, block_shared_kb: shared memory of a multiprocessor, and what a block may take of it.
        threads: that a multiprocessor holds at once; of registers of 32 bits each has 65,536.
        fp32_tflops: of the plain units. tf32_tflops, bf16_tflops: of the tensor cores, sums in fp32.
    """

    name: str
    capability: str
    multiprocessors: int
    memory_gb: int
    memory_gb_per_s: int
    l2_mb: int
    shared_kb: int
    block_shared_kb: int
    threads: int
    fp32_tflops: float
    tf32_tflops: float
    bf16_tflops: float

    def sheet(self) -> str:
        """The lines of a prompt."""
        return "\n".join(
            [
                f"- {self.name}, compute capability {self.capability}, {self.multiprocessors} multiprocessors",
                f"- memory {self.memory_gb} GB at {self.memory_gb_per_s:,} GB/s, L2 cache {self.l2_mb} MB",
                f"- a multiprocessor: {self.shared_kb} KB of shared memory ({self.block_shared_kb} KB a block), 65,536 registers, "
                f"{self.threads:,} threads",
                f"- peaks in TFLOP/s: fp32 {self.fp32_tflops:g}; tensor cores tf32 {self.tf32_tflops:g}, bf16 and fp16 {self.bf16_tflops:g}",
            ]
        )


_HOPPER = dict(
    capability="9.0", multiprocessors=132, l2_mb=50, shared_kb=228, block_shared_kb=227, threads=2048, fp32_tflops=67.0, tf32_tflops=494.0,
    bf16_tflops=989.0,
)  # fmt: skip
# Rates and memories: NVIDIA's data sheets (H100 and H200 SXM, A100 SXM 80 GB) and its white paper on Ada (RTX 4090). Shared memory and
# threads: CUDA C++ Programming Guide, "Compute Capabilities".
CARDS = {
    "h100": Card(name="NVIDIA H100 SXM", memory_gb=80, memory_gb_per_s=3350, **_HOPPER),
    "h200": Card(name="NVIDIA H200 SXM", memory_gb=141, memory_gb_per_s=4800, **_HOPPER),
    "a100": Card(
        name="NVIDIA A100 SXM 80 GB", capability="8.0", multiprocessors=108, memory_gb=80, memory_gb_per_s=2039, l2_mb=40, shared_kb=164,
        block_shared_kb=163, threads=2048, fp32_tflops=19.5, tf32_tflops=156.0, bf16_tflops=312.0,
    ),
    "rtx4090": Card(
        name="NVIDIA GeForce RTX 4090", capability="8.9", multiprocessors=128, memory_gb=24, memory_gb_per_s=1008, l2_mb=72, shared_kb=100,
        block_shared_kb=99, threads=1536, fp32_tflops=82.6, tf32_tflops=82.6, bf16_tflops=165.2,
    ),
}  # fmt: skip
