"""What the devices have that a plan is made for. All numbers are of one device; bytes are decimal, as vendors give them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
      memory_bytes: of the device.
      flops_per_s: dense products of bfloat16.
      bytes_per_s: of its memory.
      link_bytes_per_s: sent by a device to others of its host (or slice), in one direction.
      network_bytes_per_s: sent by a device beyond its host.
      host_devices: devices that the fast links join.
    """

    name: str
    memory_bytes: float
    flops_per_s: float
    bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    host_devices: int

    def between_bytes_per_s(self, extent: int) -> float:
        """What each device can count on that sends to others among so many neighbours."""
        return self.link_bytes_per_s if extent <= self.host_devices else self.network_bytes_per_s


DEVICES = {
    # NVIDIA H100 datasheet, SXM: 80 GB, 3.35 TB/s, 989 TFLOP/s (1,979 with sparsity), NVLink 900 GB/s both ways. DGX H100 datasheet:
    # one 400 Gbit/s port a card.
    "h100": Device(
        name="H100 80 GB", memory_bytes=80e9, flops_per_s=989e12, bytes_per_s=3.35e12, link_bytes_per_s=450e9, network_bytes_per_s=50e9,
        host_devices=8,
    ),
    # NVIDIA H200 datasheet, SXM: 141 GB, 4.8 TB/s, else as the H100.
    "h200": Device(
        name="H200 141 GB", memory_bytes=141e9, flops_per_s=989e12, bytes_per_s=4.8e12, link_bytes_per_s=450e9, network_bytes_per_s=50e9,
        host_devices=8,
    ),
    # Google Cloud documentation, "TPU v5p": 95 GB, 2,765 GB/s, 459 TFLOP/s, links of 1,200 GB/s both ways together, a pod of 8,960.
    "v5p": Device(
        name="TPU v5p 95 GB", memory_bytes=95e9, flops_per_s=459e12, bytes_per_s=2.765e12, link_bytes_per_s=600e9, network_bytes_per_s=600e9,
        host_devices=8960,
    ),
}  # fmt: skip

USABLE = 0.92
"""Share of a device's memory that a program gets: the rest is the runtime's, and lost between buffers."""
EFFICIENCY = {"flops": 0.5, "bytes": 0.8, "links": 0.7}
"""Shares of the three rates that a step is taken to reach. Chosen: good training programs reach 0.4 to 0.6 of the first."""
