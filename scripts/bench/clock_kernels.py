"""Twenty Triton kernels from a few microseconds to about ten milliseconds, with the tasks that they are judged against.

Run as a program it launches each one a few times, for a profiler to look at:

    ncu --clock-control none --cache-control all --kernel-name regex:^bench_ python scripts/bench/clock_kernels.py
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

LAUNCHES = 7

CHAIN_TASK = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x * 1.5 + 0.25)

def get_inputs():
    return [torch.randn({n})]

def get_init_inputs():
    return []
"""
CHAIN = """
import torch
import triton
import triton.language as tl

@triton.jit
def {name}(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, tl.maximum(x * 1.5 + 0.25, 0.0), mask=i < n)

class ModelNew(torch.nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        {name}[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
        return out
"""

SOFTMAX_TASK = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=-1)

def get_inputs():
    return [torch.randn({rows}, {cols})]

def get_init_inputs():
    return []
"""
SOFTMAX = """
import torch
import triton
import triton.language as tl

@triton.jit
def {name}(x_ptr, out_ptr, cols, BLOCK: tl.constexpr):
    row, j = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + j, mask=j < cols, other=float("-inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * cols + j, e / tl.sum(e, axis=0), mask=j < cols)

class ModelNew(torch.nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        {name}[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
        return out
"""

MATMUL_TASK = """
import torch

class Model(torch.nn.Module):
    def forward(self, a, b):
        return a @ b

def get_inputs():
    return [torch.randn({n}, {n}), torch.randn({n}, {n})]

def get_init_inputs():
    return []
"""
MATMUL = """
import torch
import triton
import triton.language as tl

@triton.jit
def {name}(a_ptr, b_ptr, c_ptr, N, B: tl.constexpr, K: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    j = tl.program_id(1) * B + tl.arange(0, B)
    acc = tl.zeros((B, B), dtype=tl.float32)
    for start in range(0, N, K):
        k = start + tl.arange(0, K)
        a = tl.load(a_ptr + i[:, None] * N + k[None, :])
        b = tl.load(b_ptr + k[:, None] * N + j[None, :])
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(c_ptr + i[:, None] * N + j[None, :], acc)

class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        n = a.shape[0]
        c = torch.empty_like(a)
        {name}[(n // 64, n // 64)](a, b, c, n, B=64, K=32)
        return c
"""


@dataclass(frozen=True)
class Case:
    """A kernel (its function is called `name`) and its task, both as source. `atol`: the task's own tolerance, None for the usual one."""

    name: str
    task: str
    kernel: str
    atol: float | None = None


def cases() -> list[Case]:
    """All twenty, in a fixed order."""
    kinds = [
        *(("chain", CHAIN_TASK, CHAIN, {"n": 1 << p}) for p in (13, 16, 18, 20, 21, 22, 24, 26)),
        *(
            ("softmax", SOFTMAX_TASK, SOFTMAX, {"rows": rows, "cols": cols})
            for rows, cols in ((64, 1024), (512, 1024), (2048, 1024), (1024, 4096), (4096, 4096), (16384, 2048))
        ),
        *(("matmul", MATMUL_TASK, MATMUL, {"n": n}) for n in (256, 512, 1024, 2048, 4096, 5888)),
    ]
    found = []
    for kind, task, kernel, sizes in kinds:
        name = f"bench_{kind}_" + "_".join(map(str, sizes.values()))
        # A product of n x n has outputs of sqrt(n) in the middle, and is off by as much more when its terms are added in another order.
        atol = 1e-4 * sizes["n"] ** 0.5 if kind == "matmul" else None
        found.append(Case(name, task.format(**sizes), kernel.format(name=name), atol))
    return found


def main() -> None:
    import importlib.util
    import tempfile
    from pathlib import Path

    import torch

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        for case in cases():
            modules = []
            for kind, source in (("task", case.task), ("kernel", case.kernel)):
                path = Path(directory) / f"{case.name}_{kind}.py"
                path.write_text(source)
                spec = importlib.util.spec_from_file_location(path.stem, path)
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                modules.append(module)
            inputs = [tensor.cuda() for tensor in modules[0].get_inputs()]
            model = modules[1].ModelNew()
            with torch.no_grad():
                for _ in range(LAUNCHES):
                    model(*inputs)
            torch.cuda.synchronize()
            print(case.name, file=sys.stderr)


if __name__ == "__main__":
    main()
