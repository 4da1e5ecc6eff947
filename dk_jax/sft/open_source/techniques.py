"""Which techniques of the cold start's skill topics (`dk_jax.sft.triton_topics`) a kernel's text shows.

Static reading of syntax, by rules that each look for what a technique is, and find nothing where that is not plain. A kernel may use
techniques that are not found; none is named that it does not use.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set

from dk_jax.sft.open_source.configs import last_name

LARGE_BLOCK, LARGE_TILE = 1024, 64
_REDUCTIONS = frozenset({"sum", "max", "min"})
_EXPONENTIALS = frozenset({"exp", "exp2"})


def techniques_of(source: str) -> tuple[str, ...]:
    """Techniques of a module's kernels, by name: those that each kernel shows which it launches, as which of several runs is not looked into.

    Args:
        source: a module that defines `@triton.jit` functions and launches them.

    Raises:
        SyntaxError: it is not valid Python.
    """
    tree = ast.parse(source)
    calls = [n for n in _calls(tree) if isinstance(n.func, ast.Subscript) and isinstance(n.func.value, ast.Name)]
    launches = {n.func.value.id: n for n in calls}
    kernels = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in launches]
    exponentials = _EXPONENTIALS | {n.name for n in tree.body if isinstance(n, ast.FunctionDef) and _is_exponential(n)}
    found = [_of_kernel(kernel, launches[kernel.name], "next_power_of_2" in source, exponentials) for kernel in kernels]
    return tuple(sorted(set.intersection(*found))) if found else ()


def _of_kernel(kernel: ast.FunctionDef, launch: ast.Call, pads_to_power: bool, exponentials: Set[str]) -> set[str]:
    loops = [n for n in ast.walk(kernel) if isinstance(n, (ast.For, ast.While))]
    calls = {last_name(n) for n in _calls(kernel)}
    in_loops = {last_name(n) for loop in loops for n in _calls(loop)}
    literals = {k.arg: k.value.value for k in launch.keywords if isinstance(k.value, ast.Constant) and isinstance(k.value.value, int)}
    out = set()
    if any(_rescales(loop, exponentials) for loop in loops):
        out.add("flash" if "dot" in in_loops else "online")
    if "swizzle2d" in calls:
        out.add("grouped_order")
    precisions = [k.value for n in _calls(kernel) for k in n.keywords if k.arg == "input_precision"]
    if any(isinstance(value, ast.Constant) and value.value == "tf32x3" for value in precisions):
        out.add("tf32x3")
    if "dot" in in_loops and "flash" not in out:
        sides = [value for name, value in literals.items() if value >= LARGE_TILE and name.upper().endswith(("M", "N"))]
        out |= {"large_tiles"} if len(sides) == 2 else set()
        out |= {"split_k"} if "atomic_add" in calls else set()
    added = [n for loop in loops for n in ast.walk(loop) if isinstance(n, ast.AugAssign) and isinstance(n.op, ast.Add)]
    if "cumsum" in in_loops and any("sum" in {last_name(c) for c in _calls(n)} for n in added):
        out.add("carry")
    if not loops and "dot" not in calls:
        block = _flat_block(kernel)
        if block is not None and literals.get(block, 0) >= LARGE_BLOCK:
            out.add("large_block")
        if pads_to_power and _whole_row(kernel):
            out.add("row_in_registers")
    if any(_accumulates(kernel, loop) for loop in loops):
        out.add("block_accumulator")
    return out


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Call))


def _is_exponential(node: ast.FunctionDef) -> bool:
    """Whether a function returns an exponential of its argument."""
    return len(node.body) == 1 and isinstance(node.body[0], ast.Return) and last_name(node.body[0].value or node.body[0]) in _EXPONENTIALS


def _rescales(loop: ast.AST, exponentials: Set[str]) -> bool:
    """Whether a sum is multiplied by the exponential of a difference of maxima before a new part is added: s = s * exp(m - n) + ..."""
    scales = {n.targets[0].id for n in ast.walk(loop) if _assigns(n) and last_name(n.value) in exponentials and _is_difference(n.value)}
    for node in ast.walk(loop):
        if _assigns(node) and isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Add) and isinstance(node.value.left, ast.BinOp):
            product = node.value.left
            if isinstance(product.op, ast.Mult) and isinstance(product.left, ast.Name) and product.left.id == node.targets[0].id:
                by = product.right
                if (last_name(by) in exponentials and _is_difference(by)) or (isinstance(by, ast.Name) and by.id in scales):
                    return True
    return False


def _assigns(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)


def _is_difference(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.args[0], ast.BinOp) and isinstance(node.args[0].op, ast.Sub)


def _flat_block(kernel: ast.FunctionDef) -> str | None:
    """The name of the block in program_id(0) * BLOCK + arange(0, BLOCK), where the kernel has one axis of programs and of elements."""
    aranges = [n for n in _calls(kernel) if last_name(n) == "arange"]
    axes = {n.args[0].value if n.args and isinstance(n.args[0], ast.Constant) else 0 for n in _calls(kernel) if last_name(n) == "program_id"}
    if len(aranges) != 1 or axes != {0} or len(aranges[0].args) != 2 or not isinstance(aranges[0].args[1], ast.Name):
        return None
    block = aranges[0].args[1].id
    products = [n for n in ast.walk(kernel) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]
    spaced = any(isinstance(side, ast.Name) and side.id == block for n in products for side in (n.left, n.right))
    reduces = any(last_name(n) in _REDUCTIONS for n in _calls(kernel))
    return block if spaced and not reduces else None


def _whole_row(kernel: ast.FunctionDef) -> bool:
    """Whether a program loads one row, reduces it, and goes on with the loaded block."""
    aranges = [n for n in _calls(kernel) if last_name(n) == "arange"]
    if len(aranges) != 1 or len(aranges[0].args) != 2 or not isinstance(aranges[0].args[1], ast.Name):
        return False
    block = aranges[0].args[1].id
    products = [n for n in ast.walk(kernel) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]
    if any(isinstance(side, ast.Name) and side.id == block for n in products for side in (n.left, n.right)):
        return False  # a block is a part of the row
    loaded = {n.targets[0].id for n in ast.walk(kernel) if _assigns(n) and any(last_name(c) == "load" for c in _calls(n.value))}
    reduced = {x.id for c in _calls(kernel) if last_name(c) in _REDUCTIONS and c.args for x in ast.walk(c.args[0]) if isinstance(x, ast.Name)}
    stores = [c for c in _calls(kernel) if last_name(c) == "store" and any(k.arg == "mask" for k in c.keywords)]
    return bool(loaded & reduced) and bool(stores)


def _accumulates(kernel: ast.FunctionDef, loop: ast.AST) -> bool:
    """Whether a loop adds blocks into a block of zeros, without reducing, and the block is reduced after it."""
    if any(last_name(c) in _REDUCTIONS | {"dot"} for c in _calls(loop)):
        return False
    zeros = {n.targets[0].id for n in ast.walk(kernel) if _assigns(n) and last_name(n.value) == "zeros"}
    added = {n.target.id for n in ast.walk(loop) if isinstance(n, ast.AugAssign) and isinstance(n.op, ast.Add) and isinstance(n.target, ast.Name)}
    reduced = {a.id for c in _calls(kernel) if last_name(c) == "sum" for a in c.args[:1] if isinstance(a, ast.Name)}
    return bool(zeros & added & reduced)
