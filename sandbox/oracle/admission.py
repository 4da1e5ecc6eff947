"""Would a trivial answer pass this task? Then it teaches nothing, and is not admitted to training."""

from __future__ import annotations

import torch

from sandbox.jail.tensors import DTYPES
from sandbox.oracle.reference import Inputs, Outputs, Reference
from sandbox.verdict.correctness import compare

ADMISSION_SLOT = 1001
OTHER_SLOT = 1002


def admission_problem(reference: Reference, seed: int) -> str:
    """Name of the trivial answer that passes the task, or "" when the task is fit for training.

    Tried on fresh inputs: zeros; a constant (the expected output's mean); each input passed through; the
    reference's output for other inputs.

    Raises:
      TaskRejected: the reference fails.
    """
    inputs = reference.inputs(seed, ADMISSION_SLOT)
    expected = reference.run(ADMISSION_SLOT, seed).tensors
    reference.inputs(seed + 1, OTHER_SLOT)
    other = reference.run(OTHER_SLOT, seed)
    tolerance = reference.tolerance
    for name, answer in _trivial_answers(inputs, expected, other):
        if compare(expected, answer, tolerance).ok:
            return f"{name} would pass as the answer"
    return ""


def _trivial_answers(
    inputs: Inputs, expected: list[torch.Tensor], other: Outputs
) -> list[tuple[str, list[torch.Tensor]]]:
    answers = [
        ("zeros", [torch.zeros_like(tensor) for tensor in expected]),
        ("ones", [torch.ones_like(tensor) for tensor in expected]),
        ("a constant", [_constant(tensor) for tensor in expected]),
        ("the output for other inputs", other.tensors),
    ]
    for number, tensor in enumerate(inputs.tensors):
        passed = [_as_output(tensor, want) for want in expected]
        if all(output is not None for output in passed):
            answers.append((f"input {number} passed through", passed))
    return answers


def _constant(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype is torch.bool:
        return torch.ones_like(tensor)
    if tensor.is_complex():
        return torch.full_like(tensor, tensor.mean().item())
    mean = tensor.to(torch.float64).mean().item()
    return torch.full_like(tensor, mean if tensor.is_floating_point() else round(mean))


def _as_output(tensor: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    """The input in the output's form, where it can be had by reshaping or broadcasting alone."""
    if tensor.dtype != want.dtype or tensor.dtype not in DTYPES.values():
        return None
    if tensor.numel() == want.numel():
        return tensor.reshape(want.shape)
    try:
        return tensor.expand(want.shape)
    except RuntimeError:
        return None
