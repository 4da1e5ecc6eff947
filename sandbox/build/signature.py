"""The C signature of a bare kernel, derived from what the reference takes and returns.

    extern "C" void kernel(<tensor inputs>, <parameters and buffers>, <outputs>)

in that order, every tensor a contiguous `const T*` (outputs `T*`). Sizes and the arguments that are not
tensors are compile-time constants in a prelude before the candidate's source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

C_TYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "_Float16",
    "bfloat16": "uint16_t",
    "int64": "long",
    "int32": "int",
    "int16": "short",
    "int8": "signed char",
    "uint8": "unsigned char",
    "bool": "bool",
}
RESERVED = frozenset(
    """alignas alignof and asm auto bool break case catch char class const constexpr continue default
    delete do double else enum explicit export extern false float for friend goto if inline int kernel long
    mutable namespace new not operator or private protected public register return short signed sizeof static
    struct switch template this throw true try typedef typename union unsigned using virtual void volatile
    while xor""".split()
)
INCLUDES = "#include <math.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <omp.h>\n"

RULE = """\
Define: extern "C" void kernel(<inputs>, <parameters and buffers>, <outputs>)
- one `const T* NAME` for each tensor argument of the reference's forward, in order, with the argument's name;
- then one for each parameter and buffer of the reference, in the order of named_parameters() and
  named_buffers(), dots in names become underscores;
- then `T* out`, or `T* out0, T* out1, ...` when the reference returns a tuple.
All tensors are contiguous. T: float for float32, double for float64, _Float16 for float16, uint16_t (raw
bits) for bfloat16, long, int, short, signed char, unsigned char, bool for the integer types and bool.
Predefined for each tensor: constexpr long NAME_n (elements), NAME_d0, NAME_d1, ... (sizes). Arguments that
are not tensors are constexpr values with their names. <math.h>, <stddef.h>, <stdint.h> and <omp.h> are
included."""


class SignatureError(ValueError):
    """The task has no C signature: an argument or result is of a kind that C cannot take."""


@dataclass(frozen=True, kw_only=True)
class TensorArgument:
    """One pointer of the signature."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def c_type(self) -> str:
        return C_TYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class KernelSignature:
    """Inputs, state and outputs in the order of the C call, and the constants of the prelude."""

    inputs: tuple[TensorArgument, ...]
    state: tuple[TensorArgument, ...]
    outputs: tuple[TensorArgument, ...]
    constants: tuple[tuple[str, Any], ...]

    @property
    def declaration(self) -> str:
        """The line that a candidate must define."""
        read = [f"const {tensor.c_type}* {tensor.name}" for tensor in (*self.inputs, *self.state)]
        written = [f"{tensor.c_type}* {tensor.name}" for tensor in self.outputs]
        return f'extern "C" void kernel({", ".join(read + written)})'

    @property
    def prelude(self) -> str:
        """Constants before the candidate's source, which then starts at line 1 of kernel.cpp."""
        lines = []
        for tensor in (*self.inputs, *self.state, *self.outputs):
            lines.append(f"constexpr long {tensor.name}_n = {math.prod(tensor.shape)};")
            lines += [
                f"constexpr long {tensor.name}_d{axis} = {size};" for axis, size in enumerate(tensor.shape)
            ]
        lines += [line for name, value in self.constants if (line := _constant(name, value))]
        return "\n".join([*lines, '#line 1 "kernel.cpp"', ""])


def make_signature(
    arguments: Sequence[str],
    values: Sequence[Any],
    state: Sequence[tuple[str, dict]],
    outputs: Sequence[dict],
    is_tuple: bool,
) -> KernelSignature:
    """Signature of a task.

    Args:
      arguments: names of forward's parameters.
      values: the actual arguments; tensors as {"dtype", "shape"} dictionaries, everything else as it is.
      state: (name, {"dtype", "shape"}) of parameters and buffers.
      outputs: {"dtype", "shape"} of each output.
      is_tuple: whether the reference returns a tuple or list.

    Raises:
      SignatureError: a nested argument, or a data type without a C type.
    """
    inputs, constants, used = [], [], set()
    for position, value in enumerate(values):
        name = _unique(arguments[position] if position < len(arguments) else f"arg{position}", used)
        if isinstance(value, dict):
            inputs.append(_tensor(name, value))
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                if not isinstance(item, dict):
                    raise SignatureError(
                        f"argument {name} is a list; only tensors and plain numbers have a C form"
                    )
                inputs.append(_tensor(_unique(f"{name}_{number}", used), item))
        else:
            constants.append((name, value))
    kept = [_tensor(_unique(name.replace(".", "_"), used, "_state"), entry) for name, entry in state]
    names = [f"out{number}" for number in range(len(outputs))] if is_tuple else ["out"]
    results = [_tensor(_unique(name, used), entry) for name, entry in zip(names, outputs, strict=True)]
    return KernelSignature(
        inputs=tuple(inputs), state=tuple(kept), outputs=tuple(results), constants=tuple(constants)
    )


def _tensor(name: str, entry: dict) -> TensorArgument:
    if entry["dtype"] not in C_TYPES:
        raise SignatureError(f"{name} is of type {entry['dtype']}, which has no C type here")
    return TensorArgument(name=name, dtype=entry["dtype"], shape=tuple(entry["shape"]))


def _unique(name: str, used: set[str], suffix: str = "_") -> str:
    while name in used or name in RESERVED:
        name += suffix
    used.add(name)
    return name


def _constant(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"constexpr long {name} = {value}L;"
    if isinstance(value, float):
        if math.isnan(value):
            return f'constexpr float {name} = __builtin_nanf("");'
        if math.isinf(value):
            return f"constexpr float {name} = {'-' if value < 0 else ''}__builtin_inff();"
        return f"constexpr float {name} = {value!r};"
    return ""
