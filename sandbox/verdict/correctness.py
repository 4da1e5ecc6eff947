"""Does an output equal the expected one? Trusted code on copies; the candidate can reach neither side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sandbox.protocol import Trial

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""Absolute and relative, as KernelBench has them."""
_PIECE = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """`|got - expected| <= atol + rtol * |expected|`; None takes the value of the expected tensor's data
    type."""

    atol: float | None = None
    rtol: float | None = None

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        default = TOLERANCES.get(dtype, 1e-4)
        return (default if self.atol is None else self.atol, default if self.rtol is None else self.rtol)


def compare(expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor], tolerance: Tolerance) -> Trial:
    """Compares all outputs; the trial's reason describes the first that is wrong.

    Checked in this order: number of outputs, data type, shape, finiteness, values. Integers and booleans
    must be equal.
    Where the reference itself is infinite the candidate must be equally so.
    """
    if len(expected) != len(got):
        return Trial(ok=False, reason=f"{len(got)} outputs, the reference has {len(expected)}")
    worst_abs = worst_rel = 0.0
    for number, (want, have) in enumerate(zip(expected, got, strict=True)):
        label = "the output" if len(expected) == 1 else f"output {number}"
        reason, abs_err, rel_err = _compare_one(want, have, tolerance)
        worst_abs, worst_rel = max(worst_abs, abs_err or 0.0), max(worst_rel, rel_err or 0.0)
        if reason:
            return Trial(ok=False, reason=f"{label} {reason}", max_abs_err=abs_err, max_rel_err=rel_err)
    return Trial(ok=True, max_abs_err=worst_abs, max_rel_err=worst_rel)


def reference_problem(expected: Sequence[torch.Tensor]) -> str:
    """Why outputs of a reference cannot be compared with, or ""."""
    if not expected:
        return "the reference returns no tensor"
    for number, tensor in enumerate(expected):
        if tensor.numel() == 0:
            return f"output {number} of the reference is empty"
        if torch.isnan(tensor).any():
            return f"output {number} of the reference contains NaN"
    return ""


def _compare_one(
    want: torch.Tensor, have: torch.Tensor, tolerance: Tolerance
) -> tuple[str, float | None, float | None]:
    if have.dtype != want.dtype:
        return f"has type {have.dtype}, expected {want.dtype}", None, None
    if have.shape != want.shape:
        return f"has shape {list(have.shape)}, expected {list(want.shape)}", None, None
    if not (want.is_floating_point() or want.is_complex()):
        wrong = have != want
        if not wrong.any():
            return "", 0.0, 0.0
        return _mismatch(wrong, want, have, ""), None, None
    largest = _within(want, have, tolerance)
    if largest is not None:
        return "", *largest
    unlike = (
        torch.isnan(have) | (torch.isinf(want) & (have != want)) | (torch.isinf(have) & ~torch.isinf(want))
    )
    if unlike.any():
        kind = "NaN" if torch.isnan(have).any() else "infinite"
        share = 100.0 * unlike.sum().item() / unlike.numel()
        hint = " (elements never written stay NaN)" if kind == "NaN" else ""
        return f"is {kind} in {share:.3g}% of its elements{hint}", None, None
    work = (
        torch.complex64
        if want.is_complex()
        else torch.float64
        if want.dtype == torch.float64
        else torch.float32
    )
    exact, value = want.to(work), have.to(work)
    error = (value - exact).abs()
    error[torch.isinf(want)] = 0
    size = exact.abs()
    size[torch.isinf(want)] = 0
    atol, rtol = tolerance.of(want.dtype)
    wrong = error > atol + rtol * size
    abs_err = error.max().item()
    rel_err = (error / size.clamp_min(max(atol, 1e-12))).max().item()
    if not wrong.any():
        return "", abs_err, rel_err
    return (
        _mismatch(wrong, want, have, f", max abs err {abs_err:.3g}, tolerance {atol:g} + {rtol:g}*|x|"),
        abs_err,
        rel_err,
    )


def _within(
    want: torch.Tensor, have: torch.Tensor, tolerance: Tolerance
) -> tuple[float, float] | None:
    """Largest absolute and relative error of an output that is right everywhere and finite; None for any other.

    Goes over the tensors in pieces that stay in the cache and makes no full-size copy, because this is what most
    checks of large outputs come to.
    """
    if want.is_complex():
        return None
    work = torch.float64 if want.dtype == torch.float64 else torch.float32
    atol, rtol = tolerance.of(want.dtype)
    abs_err = rel_err = 0.0
    for exact, value in zip(want.reshape(-1).split(_PIECE), have.reshape(-1).split(_PIECE), strict=True):
        exact, value = exact.to(work), value.to(work)
        error = (value - exact).abs_()
        size = exact.abs()
        if not error.numel():
            continue
        largest = error.max().item()
        # A bound that is infinite allows nothing here; NaN, as the difference of infinities, fails both tests.
        if not largest < float("inf") or not bool((error <= torch.add(size.mul(rtol), atol)).all()):
            return None
        abs_err = max(abs_err, largest)
        rel_err = max(rel_err, error.div_(size.clamp_(min=max(atol, 1e-12))).max().item())
    return abs_err, rel_err


def _mismatch(wrong: torch.Tensor, want: torch.Tensor, have: torch.Tensor, more: str) -> str:
    share = 100.0 * wrong.sum().item() / wrong.numel()
    flat = int(wrong.reshape(-1).to(torch.uint8).argmax())
    place, rest = [], flat
    for size in reversed(want.shape):
        place.append(rest % size)
        rest //= size
    got, expected = have.reshape(-1)[flat].item(), want.reshape(-1)[flat].item()
    where = f"first at {place[::-1]}: got {_short(got)}, expected {_short(expected)}"
    return f"differs in {share:.3g}% of its elements ({where}{more})"


def _short(value: float | int | bool | complex) -> str:
    return f"{value:.6g}" if isinstance(value, (float, complex)) else str(value)
