"""Functions of CUDA's device library in terms of `triton.language`.

Triton's interpreter cannot run the device library, so that kernels which use it could not be checked without a GPU. What has a plain
equivalent is written with it; anything else keeps a kernel from being extracted.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from dk_jax.sft.open_source.facts import LIBDEVICE
from dk_jax.sft.open_source.modules import ExtractError

_SAME = {
    **{name: f"tl.{name}" for name in "exp exp2 log log2 sqrt rsqrt sin cos erf abs floor ceil fma".split()},
    "div_rn": "tl.div_rn", "sqrt_rn": "tl.sqrt_rn", "fabs": "tl.abs", "fast_expf": "tl.exp", "fast_logf": "tl.log", "fast_log2f": "tl.log2",
    "fast_sinf": "tl.sin", "fast_cosf": "tl.cos", "fast_dividef": "tl.fdiv", "max": "tl.maximum", "min": "tl.minimum",
}  # fmt: skip
"""Function of the device library -> the same in triton.language. (triton.language.math has these under the same names.)"""

_HELPERS = {
    "tanh": "def tanh(x):\n    return 2.0 * tl.sigmoid(2.0 * x) - 1.0",
    "fast_tanhf": "def tanh(x):\n    return 2.0 * tl.sigmoid(2.0 * x) - 1.0",
    "tan": "def tan(x):\n    return tl.sin(x) / tl.cos(x)",
    "sinh": "def sinh(x):\n    return 0.5 * (tl.exp(x) - tl.exp(-x))",
    "cosh": "def cosh(x):\n    return 0.5 * (tl.exp(x) + tl.exp(-x))",
    # log(1 + x) with the rounding of 1 + x divided out again (W. Kahan).
    "log1p": "def log1p(x):\n    u = 1.0 + x\n    d = tl.where(u == 1.0, 1.0, u - 1.0)\n    return tl.where(u == 1.0, x, tl.log(u) * (x / d))",
    "trunc": "def trunc(x):\n    return tl.where(x >= 0, tl.floor(x), tl.ceil(x))",
    "div_rz": "def div_rz(x, y):\n    q = x / y\n    return tl.where(q >= 0, tl.floor(q), tl.ceil(q))",
    "fmod": "def fmod(x, y):\n    q = x / y\n    return x - y * tl.where(q >= 0, tl.floor(q), tl.ceil(q))",
    "isnan": "def isnan(x):\n    return x != x",
    "isinf": "def isinf(x):\n    return tl.abs(x) == float('inf')",
    "isfinited": "def is_finite(x):\n    return tl.abs(x) < float('inf')",
    "finitef": "def is_finite(x):\n    return tl.abs(x) < float('inf')",
}
_POWERS = {2: "def square(x):\n    return x * x", 3: "def cube(x):\n    return x * x * x"}
_IN_TRITON_MATH = frozenset(
    "abs ceil cos div_rn erf exp exp2 fdiv floor fma log log2 rsqrt sin sqrt sqrt_rn umulhi".split()
)


def in_device_library(dotted: str) -> str | None:
    """The function's name there, or None for anything else; what triton.language.math has itself is not of the device library."""
    for prefix in LIBDEVICE:
        if dotted.startswith(prefix):
            name = dotted.removeprefix(prefix)
            return None if prefix.endswith("language.math.") and name in _IN_TRITON_MATH else name
    return None


def portable(name: str, helper: Callable[[ast.FunctionDef], ast.expr]) -> ast.expr:
    """An expression for a function of the device library.

    Args:
        name: the function.
        helper: takes the definition of a `@triton.jit` function that is needed, and returns how to refer to it.

    Raises:
        ExtractError: it has no plain equivalent.
    """
    if name in _SAME:
        return ast.parse(_SAME[name], mode="eval").body
    if name in _HELPERS:
        return helper(_definition(_HELPERS[name]))
    raise ExtractError(f"it needs {name} of CUDA's device library, which has no plain equivalent in triton.language")


def portable_power(call: ast.Call, helper: Callable[[ast.FunctionDef], ast.expr]) -> ast.expr:
    """A call of the device library's pow, whose exponent has to be 2 or 3.

    Raises:
        ExtractError: it is not.
    """
    exponent = call.args[1].value if len(call.args) == 2 and isinstance(call.args[1], ast.Constant) else None
    if exponent not in _POWERS:
        raise ExtractError("it needs pow of CUDA's device library with an exponent other than 2 or 3, which has no plain equivalent")
    return ast.Call(helper(_definition(_POWERS[exponent])), [call.args[0]], [])


def _definition(text: str) -> ast.FunctionDef:
    return ast.parse(f"@triton.jit\n{text}").body[0]
