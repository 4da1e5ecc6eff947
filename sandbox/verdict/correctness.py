"""Does an output equal the expected one? Trusted code on copies; the candidate can reach neither side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sandbox.protocol import Trial

RMS_LIMITS = {torch.float64: 5e-5, torch.float32: 5e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Relative root-mean-square error of a whole output. Honest float32 work stays near 1e-7, float16 and TF32
begin at 2e-4; elementwise tolerances alone take zeros for an output whose values all lie below them."""
NOISE_FACTOR = 30.0
"""So many times the reference's own rounding is a candidate's due, where that is more."""
VARIANT_SLACK = 4.0
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""Absolute and relative, as KernelBench has them."""
_PIECE, _DEVICE_PIECE = 1 << 18, 1 << 26
"""Elements compared at a time: what stays in a core's cache, and what keeps a GPU busy without filling its memory."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """`|got - expected| <= atol + rtol * |expected|`; None takes the value of the expected tensor's data
    type.

    Attributes:
      noise: relative root-mean-square error of the reference itself, for each output. With it, and without
        tolerances of the task's own, the same measure of the candidate's error is limited too.
      bounds: (atol, rtol) for each output instead of `atol` and `rtol`.
      floors: for each output an atol that the reference's own rounding asks for; it counts where the data
        type's own atol would, if it is larger.
      growth, slack: see `for_variant`.
    """

    atol: float | None = None
    rtol: float | None = None
    noise: tuple[float, ...] | None = None
    bounds: tuple[tuple[float, float], ...] | None = None
    floors: tuple[float, ...] | None = None
    growth: float = 1.0
    slack: float = 1.0

    def of_output(self, number: int) -> Tolerance:
        """The tolerance of one output alone."""
        if self.bounds is not None:
            atol, rtol = self.bounds[number]
            return Tolerance(atol=atol, rtol=rtol)
        noise, floors = (of and (of[number],) for of in (self.noise, self.floors))
        return replace(self, noise=noise, floors=floors)

    def for_variant(self, growth: float) -> Tolerance:
        """For inputs of another distribution, on which outputs are `growth` times as large as usual.

        What was small against them still is, and sums of unusual inputs round worse than usual ones:
        elementwise bounds are wider, and the error of the whole is not limited.
        """
        bounds = self.bounds and tuple(
            (atol * growth * VARIANT_SLACK, rtol * VARIANT_SLACK) for atol, rtol in self.bounds
        )
        return replace(self, bounds=bounds, noise=None, growth=growth, slack=VARIANT_SLACK)

    def rms_limit(self, dtype: torch.dtype) -> float | None:
        """Largest relative root-mean-square error, or None where there is no such limit."""
        if self.noise is None or self.atol is not None or self.rtol is not None:
            return None
        return max(RMS_LIMITS.get(dtype, 5e-5), NOISE_FACTOR * self.noise[0])

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        """(atol, rtol) for an output of a data type."""
        default = TOLERANCES.get(dtype, 1e-4)
        least = max(default, self.floors[0]) if self.floors else default
        atol, rtol = least if self.atol is None else self.atol, default if self.rtol is None else self.rtol
        return atol * self.growth * self.slack, rtol * self.slack


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
        reason, abs_err, rel_err = _compare_one(want, have, tolerance.of_output(number))
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
        if has_nan(tensor):
            return f"output {number} of the reference contains NaN"
    return ""


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. A finite sum says so at once, and takes a twentieth of the time."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def has_nan(tensor: torch.Tensor) -> bool:
    """Whether an element is NaN: then so is the sum."""
    return bool(torch.isnan(tensor.sum())) and bool(torch.isnan(tensor).any())


def _compare_one(
    want: torch.Tensor, have: torch.Tensor, tolerance: Tolerance
) -> tuple[str, float | None, float | None]:
    if have.dtype != want.dtype:
        return f"has type {have.dtype}, expected {want.dtype}", None, None
    if have.shape != want.shape:
        return f"has shape {list(have.shape)}, expected {list(want.shape)}", None, None
    have = have.to(want.device)
    if not (want.is_floating_point() or want.is_complex()):
        wrong = have != want
        if not wrong.any():
            return "", 0.0, 0.0
        return _mismatch(wrong, want, have, ""), None, None
    largest = _within(want, have, tolerance)
    if largest is not None:
        abs_err, rel_err, rms_err = largest
        limit = tolerance.rms_limit(want.dtype)
        if limit is not None and rms_err > limit:
            return (
                f"has too little precision: relative rms error {rms_err:.2g}, {limit:.2g} is the most for "
                f"{str(want.dtype).removeprefix('torch.')}",
                abs_err,
                rel_err,
            )
        return "", abs_err, rel_err
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
) -> tuple[float, float, float] | None:
    """Largest absolute, largest relative and relative root-mean-square error of an output that is right
    everywhere and finite; None for any other.

    Goes over the tensors in pieces that stay in the cache and makes no full-size copy, nor new memory for each piece,
    because this is what most checks of large outputs come to.
    """
    if want.is_complex():
        return None
    work = torch.float64 if want.dtype == torch.float64 else torch.float32
    atol, rtol = tolerance.of(want.dtype)
    abs_err = rel_err = squares = error_squares = 0.0
    piece = _PIECE if want.device.type == "cpu" else _DEVICE_PIECE
    errors, sizes = (torch.empty(min(piece, want.numel()), dtype=work, device=want.device) for _ in range(2))
    for exact, value in zip(want.reshape(-1).split(piece), have.reshape(-1).split(piece), strict=True):
        count = exact.numel()
        if not count:
            continue
        exact, value, error, size = exact.to(work), value.to(work), errors[:count], sizes[:count]
        torch.sub(value, exact, out=error).abs_()
        torch.abs(exact, out=size)
        largest = error.max().item()
        # An infinite bound allows nothing here; NaN, as the difference of infinities, fails both tests.
        if not largest < float("inf"):
            return None
        if largest > atol and not bool((error <= torch.add(size.mul(rtol), atol)).all()):
            return None
        abs_err = max(abs_err, largest)
        error_squares += torch.dot(error, error).item()
        squares += torch.dot(size, size).item()
        rel_err = max(rel_err, error.div_(size.clamp_(min=max(atol, 1e-12))).max().item())
    return abs_err, rel_err, math.sqrt(error_squares / squares) if squares > 0 else 0.0


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
