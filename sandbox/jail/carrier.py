"""How the oracle hands tensors to a runner and takes them from it: through the host, or in shared device memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sandbox.jail.arena import Arena, part, read, write
from sandbox.jail.frames import Message
from sandbox.jail.tensors import pack, unpack


class HostCarrier:
    """Tensors travel as payloads of messages and lie in the host's memory on both ends."""

    wanted: dict[str, Any] = {}
    """Fields of an order whose reply brings tensors."""

    def give(self, tensors: Sequence[torch.Tensor]) -> tuple[dict[str, Any], list[memoryview]]:
        """Fields and buffers of an order that brings `tensors`."""
        entries, buffers = pack([tensor.cpu() for tensor in tensors])
        return {"tensors": entries}, buffers

    def take(self, message: Message) -> list[torch.Tensor]:
        """Tensors of a reply. Raises ValueError if it is malformed."""
        return unpack(message.header.get("tensors"), message.buffers)

    def close(self) -> None:
        return


class ArenaCarrier(HostCarrier):
    """Tensors lie on the GPU; what does not fit into the arena goes through the host.

    Args:
      arena: of one runner; owned and closed by this object.
    """

    wanted = {"reply_in_arena": True}

    def __init__(self, arena: Arena):
        self._arena: Arena | None = arena
        self._device, self.bytes = arena.memory.device, arena.memory.numel()

    @classmethod
    def create(cls, index: int, n_bytes: int) -> tuple[ArenaCarrier, int]:
        """A carrier with an arena of at least `n_bytes` on CUDA device `index`, and the arena's descriptor for the runner.

        Raises:
          ArenaError: see `Arena.create`. RuntimeError: there is no such device.
        """
        arena, fd = Arena.create(index, n_bytes)
        return cls(arena), fd

    def give(self, tensors: Sequence[torch.Tensor]) -> tuple[dict[str, Any], list[memoryview]]:
        entries = write(self.part("inputs"), tensors)
        if entries is None:
            return super().give(tensors)
        self.synchronize()
        return {"tensors": entries, "arena": True}, []

    def take(self, message: Message) -> list[torch.Tensor]:
        """Copies of what the runner left, made before anything is read: it may write the arena at any time."""
        if message.header.get("arena") is not True:
            return [tensor.to(self._device) for tensor in super().take(message)]
        copies = [tensor.clone() for tensor in read(self.part("outputs"), message.header.get("tensors"))]
        self.synchronize()
        return copies

    @property
    def memory(self) -> torch.Tensor:
        """All of the arena: uint8[bytes]."""
        assert self._arena is not None
        return self._arena.memory

    def part(self, name: str) -> torch.Tensor:
        """See `sandbox.jail.arena.part`."""
        return part(self.memory, name)

    def close(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # copies of this evaluation's tensors; other processes need the memory

    def synchronize(self) -> None:
        """Waits for the oracle's own work on the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
