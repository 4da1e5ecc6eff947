"""What a call of a PyTorch module must do at least: what it reads of given tensors, what it writes, how many operations it computes.

Every operator of one real call is looked at (`TorchDispatchMode`). A tensor counts once however often it is read, and in full, but for
two cases: of one that is only read in parts (views) these parts count, and a lookup (an embedding, a gather) reads no more than it returns.
Operations are those of matrix products, convolutions and attention, by the formulas of `torch.utils.flop_counter`, whose import takes
every process a second (it brings Triton along); elementwise arithmetic and recurrent layers of cuDNN count for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
Shape = torch.Size
_LOOKUPS = {_aten.embedding, _aten.index_select, _aten.gather, _aten.index, _aten.take, _aten._embedding_bag}
"""They read of their first argument about as much as they return."""


def _product(a: Shape, b: Shape) -> int:
    """Of [..., M, K] by [..., K, N]; b may be a vector [K]."""
    return 2 * math.prod(a) * (b[-1] if len(b) > 1 else 1)


def _convolution(args: tuple[Any, ...], out: Shape) -> int:
    x, weight, transposed = args[0].shape, args[1].shape, args[6]
    return 2 * x[0] * math.prod(weight) * math.prod((x if transposed else out)[2:])


def _attention(args: tuple[Any, ...], out: Shape) -> int:
    query, key, value = (tensor.shape for tensor in args[:3])
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


_FORMULAS: dict[Any, Callable[[tuple[Any, ...], Shape], int]] = {
    **{op: lambda args, out: _product(args[0].shape, args[1].shape) for op in (_aten.mm, _aten.bmm, _aten.mv, _aten.dot)},
    **{op: lambda args, out: _product(args[1].shape, args[2].shape) for op in (_aten.addmm, _aten.baddbmm, _aten.addmv, _aten._addmm_activation)},
    _aten.linear: lambda args, out: _product(args[0].shape, args[1].shape[::-1]),
    _aten.convolution: _convolution,
    **{
        op: _attention
        for op in (
            _aten._scaled_dot_product_efficient_attention,
            _aten._scaled_dot_product_flash_attention,
            _aten._scaled_dot_product_cudnn_attention,
            _aten._scaled_dot_product_flash_attention_for_cpu,
        )
    },
}


def count_work(call: Callable[..., Any], args: Iterable[Any], state: Iterable[torch.Tensor]) -> dict[str, int]:
    """Calls once and counts.

    Args:
      args: of the call; the tensors among them and `state` (parameters, buffers) are what its reads are counted of.

    Returns:
      `read_bytes`, `written_bytes` (of the outputs; an expanded one writes what it is expanded from) and `flops`.
    """
    args = list(args)
    tracked = [leaf for leaf in (*tree_leaves(args), *state) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
    with _Watch(tracked) as watch:
        outputs = call(*args)
    written = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
    return {"read_bytes": watch.read_bytes, "written_bytes": sum(map(_distinct_bytes, written)), "flops": watch.flops}


class _Watch(TorchDispatchMode):
    """Within it operators are looked at.

    Args:
      tracked: whose reads are counted.
    """

    def __init__(self, tracked: Iterable[torch.Tensor]):
        super().__init__()
        self.flops = 0
        self._sizes = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in tracked}
        self._reads: dict[int, dict[tuple, int]] = {}

    @property
    def read_bytes(self) -> int:
        return sum(min(self._sizes[storage], sum(parts.values())) for storage, parts in self._reads.items())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here; PyTorch would import its compiler, which takes seconds, to have it step aside."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if _is_view(func):
            return out
        formula = _FORMULAS.get(func.overloadpacket)
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if formula is not None and leaves:
            self.flops += formula(args, leaves[0].shape)
        for number, tensor in enumerate(tree_leaves((args, kwargs))):
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or _storage(tensor) not in self._sizes:
                continue
            n_bytes = _distinct_bytes(tensor)
            if number == 0 and func.overloadpacket in _LOOKUPS:
                n_bytes = min(n_bytes, sum(leaf.nbytes for leaf in leaves))
            part = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            parts = self._reads.setdefault(_storage(tensor), {})
            parts[part] = max(n_bytes, parts.get(part, 0))
        return out


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _distinct_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, those of an expanded dimension once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size]
    return math.prod(sizes) * tensor.element_size()


def _is_view(func: Any) -> bool:
    """Whether an operator reads nothing: all that it returns is memory of its arguments, unchanged."""
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
