"""Candidates of the soak: honest and hostile ones with the verdicts that they must get, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from serving import ROOT  # noqa: F401  (puts the project on the path)

from sandbox.protocol import Candidate, TaskSpec

REFERENCE = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2.0 + 1.0

def get_inputs():
    return [torch.randn({rows}, 1024)]

def get_init_inputs():
    return []
"""

KERNEL = """{before}
extern "C" void kernel(const float* x, float* out) {{
    {first}
    for (long i = 0; i < x_n; ++i) out[i] = {value};
}}
// {number}
"""

MODULE = """{before}
import torch

class ModelNew(torch.nn.Module):
    def forward(self, x):
        {first}
        return {value}
# {number}
"""

TRITON = """
import os, sys, time
import torch, triton
import triton.language as tl

@triton.jit
def relu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = {offsets} + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = {mask}
    x = tl.load(x_ptr + offsets, mask=mask)
    {inside}
    tl.store(out_ptr + offsets, {value}, mask=mask)

class ModelNew(torch.nn.Module):
    def forward(self, x):
        {first}
        out = torch.empty_like(x)
        relu_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
        return out
# {number}
"""
RIGHT = "(x[i] > 0 ? x[i] : 0) * 2 + 1"
FORKS = "for (int k = 0; k < 64; ++k) if (fork() == 0) { for (;;) pause(); }"
FILL = (
    'FILE* f = fopen("full", "w"); static char b[1 << 20]; '
    "for (int k = 0; k < 1 << 16; ++k) if (fwrite(b, 1, sizeof b, f) != sizeof b) abort();"
)


@dataclass(frozen=True)
class Kind:
    """A kind of candidate: its share of the mix, the outcomes that are right for it, and how to write the n-th one."""

    name: str
    weight: int
    outcomes: tuple[str, ...]
    write: Callable[[int], Candidate]

    @property
    def hostile(self) -> bool:
        return self.name.startswith("hostile")


def _kernel(*, before: str = "", first: str = "", value: str = RIGHT) -> Callable[[int], Candidate]:
    def write(number: int) -> Candidate:
        source = KERNEL.format(before=before, first=first, value=value, number=number)
        return Candidate(source=source, language="cpp", form="kernel")

    return write


def _module(language: str, template: str, **parts: str) -> Callable[[int], Candidate]:
    def write(number: int) -> Candidate:
        return Candidate(source=template.format(number=number, **parts), language=language)

    return write


def _triton(**parts: str) -> Callable[[int], Candidate]:
    usual = dict(
        offsets="0", mask="offsets < n", inside="x = tl.maximum(x, 0.0)", value="x * 2.0 + 1.0", first="pass"
    )
    return _module("triton", TRITON, **(usual | parts))


STOPPED = ("timeout",)
DIED = ("runtime_error", "out_of_memory")
CPU_KINDS = (
    Kind("honest kernel", 30, ("ok",), _kernel()),
    Kind("honest threaded kernel", 10, ("ok",), _kernel(before="#include <omp.h>", first="#pragma omp parallel for")),
    Kind("honest wrong kernel", 15, ("incorrect",), _kernel(value="x[i]")),
    Kind("honest broken kernel", 10, ("build_failed",), _kernel(value="nothing")),
    Kind("hostile endless", 8, STOPPED, _kernel(first="for (volatile long k = 0;; ++k);")),
    Kind("hostile crash", 5, DIED, _kernel(first="*(volatile int*)8 = 1;")),
    Kind("hostile exit 0", 4, DIED, _kernel(before="#include <unistd.h>", first="_exit(0);")),
    Kind("hostile memory", 5, DIED, _kernel(
        before="#include <cstdlib>\n#include <cstring>",
        first="for (;;) { void* p = malloc(1 << 28); if (!p) abort(); memset(p, 1, 1 << 28); }",
    )),
    Kind("hostile forks", 4, ("ok", *DIED, "timeout"), _kernel(before="#include <unistd.h>", first=FORKS)),
    Kind("hostile disk", 3, (*DIED, "timeout"), _kernel(before="#include <cstdio>\n#include <cstdlib>", first=FILL)),
    Kind("hostile output", 3, ("ok", "timeout", *DIED), _kernel(
        before="#include <cstdio>", first='for (int k = 0; k < 1 << 22; ++k) fputs("0123456789abcdef\\n", stdout);'
    )),
    Kind("hostile build", 1, ("build_failed", "timeout", "out_of_memory"), _kernel(
        before="template <int n> struct T { T<n + 1> t; }; T<0> endless;"
    )),
)  # fmt: skip

GPU_KINDS = (
    Kind("honest kernel", 45, ("ok",), _triton()),
    Kind("honest wrong kernel", 12, ("incorrect",), _triton(inside="x = tl.maximum(x, -1.0)")),
    Kind("honest broken kernel", 10, ("build_failed", "load_failed", "runtime_error"), _triton(value="nothing")),
    Kind("hostile endless kernel", 9, STOPPED, _triton(inside="while tl.sum(x * 0.0) < 1.0:\n        x = x + 0.0")),
    Kind("hostile endless host", 6, STOPPED, _triton(first="time.sleep(1e6)")),
    Kind("hostile illegal access", 9, DIED, _triton(offsets="(1 << 40)", mask="offsets >= 0")),
    Kind("hostile device memory", 6, DIED, _triton(first="kept = [torch.ones(1 << 30, device=x.device) for _ in range(1000)]")),
    Kind("hostile host memory", 3, DIED, _triton(first="kept = [b'1' * (1 << 28) for _ in range(100000)]")),
    Kind("hostile forks", 4, ("ok", *DIED, "timeout"), _triton(first="[os.fork() or time.sleep(1e6) for _ in range(64)]")),
    Kind("hostile exit 0", 3, DIED, _triton(first="os._exit(0)")),
)  # fmt: skip


def task(device: str) -> TaskSpec:
    """The one task of the soak."""
    rows = 256 if device == "cpu" else 4096
    return TaskSpec(reference=REFERENCE.format(rows=rows), name="soak", device=device)
