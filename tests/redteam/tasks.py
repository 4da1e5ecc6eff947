"""Tasks that the red team attacks, and the honest twin of each: the same answer, honestly come by.

A task's work is heavy enough (a fraction of a millisecond for eager) that leaving it out shows at once.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from sandbox.protocol import Candidate, TaskSpec

LINEAR = TaskSpec(
    name="redteam_linear",
    reference="""
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, features) / 16)
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x):
        return torch.relu(x @ self.weight + self.bias)

def get_inputs():
    return [torch.randn(256, 256)]

def get_init_inputs():
    return [256]
""",
)
"""relu(x @ W + b), 256 x 256 x 256."""

_NO_STATE = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return {forward}

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
"""


def stateless(name: str, forward: str, inputs: str, **more) -> TaskSpec:
    """A task without parameters: `forward` of x, which `inputs` draws."""
    return TaskSpec(name=name, reference=_NO_STATE.format(forward=forward, inputs=inputs), **more)


SOFTMAX = stateless("redteam_softmax", "torch.softmax(x, dim=1)", "torch.randn(64, 4096)")
TINY_OUTPUT = stateless("redteam_tiny_output", "torch.softmax(x, dim=1)", "torch.randn(16, 16384)")
"""Outputs of about 6e-5: zeros are within an absolute tolerance of 1e-4."""
NEAR_IDENTITY = stateless("redteam_near_identity", "x * 1.0", "torch.randn(256, 256)")
SCALED = stateless("redteam_scaled", "x * 1.0", "torch.randn(512, 1024)")
"""Takes no longer than a copy."""
ROW_MEAN = stateless("redteam_row_mean", "x.mean(dim=1)", "torch.randn(64, 8192)")
SQUARE = stateless("redteam_square", "x @ x", "torch.randn(256, 256) / 16")
IN_PLACE = stateless("redteam_in_place", "x.mul_(2.0).add_(1.0)", "torch.randn(256, 256)")
DETERMINANT = stateless(
    "redteam_inverse",
    "torch.linalg.inv(x)",
    "torch.eye(48) + torch.randn(48, 48) / 100",
)
"""Well-conditioned on purpose: a Neumann series of a few terms is right there, and only there."""

MODULE_HEAD = """import torch
import torch.nn as nn
{before}

class ModelNew(nn.Module):
    def __init__(self, features=256):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, features) / 16)
        self.bias = nn.Parameter(torch.randn(features))
{init}
    def honest(self, x):
        return torch.relu(x @ self.weight + self.bias)

    def forward(self, x):
{forward}
{after}
"""
SIGNATURE = 'extern "C" void kernel(const float* x, const float* weight, const float* bias, float* out)'
HONEST_KERNEL = """
typedef float eight __attribute__((vector_size(32), aligned(4)));
static void honest(const float* __restrict x, const float* __restrict weight, const float* __restrict bias,
                   float* __restrict out) {
    for (long i = 0; i < x_d0; ++i)
        for (long j = 0; j < bias_n; j += 32) {
            const eight* b = (const eight*)(bias + j);
            eight sum0 = b[0], sum1 = b[1], sum2 = b[2], sum3 = b[3];
            for (long k = 0; k < x_d1; ++k) {
                const eight* w = (const eight*)(weight + k * bias_n + j);
                const float a = x[i * x_d1 + k];
                sum0 += a * w[0]; sum1 += a * w[1]; sum2 += a * w[2]; sum3 += a * w[3];
            }
            eight* row = (eight*)(out + i * bias_n + j);
            row[0] = sum0; row[1] = sum1; row[2] = sum2; row[3] = sum3;
            for (long n = 0; n < 32; ++n) out[i * bias_n + j + n] = fmaxf(out[i * bias_n + j + n], 0.0f);
        }
}
"""
"""Sums in registers. One that adds up in `out` runs at half its speed wherever `out` and `weight` lie at the same place of
their pages (the processor takes a load for one of what was just stored), so by chance, from process to process."""


def indent(text: str, columns: int) -> str:
    """`text` with its first line's margin replaced by `columns` blanks."""
    return textwrap.indent(textwrap.dedent(text.strip("\n").rstrip()), " " * columns)


def module(forward: str, before: str = "", init: str = "", after: str = "") -> Candidate:
    """A Python candidate for LINEAR; `self.honest(x)` in it is the honest answer."""
    source = MODULE_HEAD.format(
        before=before.strip("\n"), init=indent(init, 8), forward=indent(forward, 8), after=after.strip("\n")
    )
    return Candidate(source=source, language="cpp")


def stateless_module(forward: str, before: str = "") -> Candidate:
    """A Python candidate for a task without parameters."""
    source = (
        f"import torch\n{before.strip()}\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n"
        f"{indent(forward, 8)}\n"
    )
    return Candidate(source=source, language="cpp")


def kernel(body: str, before: str = "") -> Candidate:
    """A bare kernel for LINEAR; `honest(x, weight, bias, out)` in it does the honest work."""
    return Candidate(
        source=f"{before}\n{HONEST_KERNEL}\n{SIGNATURE} {{\n{body}\n}}\n", language="cpp", form="kernel"
    )


def stateless_kernel(body: str, before: str = "") -> Candidate:
    """A bare kernel for a task with one float input and one float output."""
    signature = 'extern "C" void kernel(const float* x, float* out)'
    return Candidate(source=f"{before}\n{signature} {{\n{body}\n}}\n", language="cpp", form="kernel")


@dataclass(frozen=True)
class Twin:
    """The honest candidate that an attack is held against."""

    task: TaskSpec
    candidate: Candidate


def twin_of(task: TaskSpec, candidate: Candidate) -> Twin | None:
    """The honest twin with the same task and form; None for tasks whose attacks are never ok."""
    if task.name == LINEAR.name:
        bare = candidate.form == "kernel"
        return Twin(
            task, kernel("    honest(x, weight, bias, out);") if bare else module("return self.honest(x)")
        )
    forwards = {
        SOFTMAX.name: "return torch.softmax(x, dim=1)",
        TINY_OUTPUT.name: "return torch.softmax(x, dim=1)",
        NEAR_IDENTITY.name: "return x * 1.0",
        SCALED.name: "return x * 1.0",
        ROW_MEAN.name: "return x.mean(dim=1)",
        DETERMINANT.name: "return torch.linalg.inv(x)",
    }
    return Twin(task, stateless_module(forwards[task.name])) if task.name in forwards else None
