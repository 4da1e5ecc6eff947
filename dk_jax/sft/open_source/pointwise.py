"""Elementwise functions whose kernels a package writes at run time: one plain kernel and its launcher in their place.

flag_gems declares an elementwise operation as a scalar `@triton.jit` function under `pointwise_dynamic`, which generates a kernel for
the ranks and strides that it meets. Here the scalar function is kept as it is, and a kernel over a flat index calls it; that kernel and
its launcher are this project's text, the scalar function the package's.
"""

from __future__ import annotations

import ast
import dataclasses

from dk_jax.sft.open_source.modules import ExtractError

DECORATOR = "pointwise_dynamic"
BLOCK = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pointwise:
    """Signature of an elementwise function.

    Attributes:
        tensors: of its arguments, whether each is a tensor (or a number).
        booleans: of its outputs, whether each is boolean (or of the first tensor's type).
    """

    tensors: tuple[bool, ...]
    booleans: tuple[bool, ...]


def signature(node: ast.FunctionDef, decorator: ast.expr) -> Pointwise:
    """The signature that a `pointwise_dynamic(...)` declares for a function.

    Raises:
        ExtractError: its arguments are not literals.
    """
    if not isinstance(decorator, ast.Call):
        raise ExtractError(f"{node.name}: {DECORATOR} without arguments")
    try:
        named = {k.arg: ast.literal_eval(k.value) for k in decorator.keywords if k.arg in ("is_tensor", "num_outputs", "promotion_methods")}
    except ValueError as error:
        raise ExtractError(f"{node.name}: {DECORATOR} with arguments that are not literals") from error
    count = len(node.args.args)
    tensors = tuple(named.get("is_tensor") or [True] * count)
    promotions = named.get("promotion_methods") or [(0, "DEFAULT")]
    outputs = named.get("num_outputs") or len(promotions)
    if len(tensors) != count or not any(tensors) or len(promotions) != outputs:
        raise ExtractError(f"{node.name}: {DECORATOR} with a signature that does not fit the function")
    return Pointwise(tensors=tensors, booleans=tuple(method[-1] == "ALWAYS_BOOL" for method in promotions))


def launcher_text(names: list[str], shape: Pointwise) -> str:
    """Kernel and launcher of an elementwise function.

    Args:
        names: of the function's arguments.
        shape: which of them are tensors, and what comes out.

    Returns:
        Two definitions, `KERNEL` and `LAUNCHER`, that call the scalar function `SCALAR`.
    """
    tensors = [name for name, is_tensor in zip(names, shape.tensors, strict=True) if is_tensor]
    outs = [f"out{i}" for i in range(len(shape.booleans))]
    kernel_args = [f"{n}_ptr" if t else n for n, t in zip(names, shape.tensors, strict=True)] + [f"{o}_ptr" for o in outs]
    first = tensors[0]
    together = f"    {', '.join(tensors)} = torch.broadcast_tensors({', '.join(tensors)})\n" if len(tensors) > 1 else ""
    makes = ["torch.empty_like({0}, dtype=torch.bool)" if b else "torch.empty_like({0})" for b in shape.booleans]
    return "".join(
        [
            f"@triton.jit\ndef KERNEL({', '.join(kernel_args)}, n_elements, BLOCK_SIZE: tl.constexpr):\n",
            "    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)\n",
            "    mask = offsets < n_elements\n",
            *[f"    {name} = tl.load({name}_ptr + offsets, mask=mask)\n" for name in tensors],
            f"    {', '.join(outs)} = SCALAR({', '.join(names)})\n",
            *[f"    tl.store({out}_ptr + offsets, {out}, mask=mask)\n" for out in outs],
            f"\ndef LAUNCHER({', '.join(names)}):\n",
            together,
            *[f"    {name} = {name}.contiguous()\n" for name in tensors],
            *[f"    {out} = {make.format(first)}\n" for out, make in zip(outs, makes, strict=True)],
            f"    n_elements = {first}.numel()\n",
            f"    KERNEL[(triton.cdiv(n_elements, {BLOCK}),)]({', '.join([*names, *outs])}, n_elements, BLOCK_SIZE={BLOCK})\n",
            f"    return {', '.join(outs)}\n",
        ]
    )
