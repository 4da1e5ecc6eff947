"""Attacks that need a GPU: streams, graphs, library laundering, GPU memory, TF32, poisoned contexts.

Each is a module for `task_matmul` (relu(a @ b), 2048 x 2048) or `task_add` (x + y). Where "ok" is allowed the attack
is neutralised: it must be no faster than its honest twin.
"""

from __future__ import annotations

from dataclasses import dataclass

from sandbox.protocol import Outcome
from tests.gpu.redteam.sources import HEAD, forward


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """One attack; `body` completes HEAD, or is the whole module where `whole` is set."""

    number: int
    name: str
    why: str
    body: str
    outcomes: tuple[Outcome, ...]
    task: str = "task_add"
    language: str = "triton"
    whole: bool = False
    never_says: str = "\0"
    """What must not be in the result's words."""

    @property
    def source(self) -> str:
        return self.body if self.whole else HEAD + self.body


NEVER: tuple[Outcome, ...] = ("integrity", "incorrect", "runtime_error")
CASES = [
    GpuCase(
        number=1,
        name="side_stream",
        why="events on the current stream bracket nothing",
        body=forward(
            "with torch.cuda.stream(SIDE[0]):\n    return add(x, y)",
            "SIDE = []\n_new = torch.cuda.Stream\n"
            "class _Lazy(list):\n    def __getitem__(self, i):\n        if not len(self): self.append(_new())\n"
            "        return super().__getitem__(i)\nSIDE = _Lazy()",
        ),
        outcomes=("ok", *NEVER),
    ),
    GpuCase(
        number=2,
        name="stream_made_in_the_extension",
        why="a stream created in C++, its API's name pasted together, is unknown to Python",
        whole=True,
        language="cuda",
        body='''
import torch
from torch.utils.cpp_extension import load_inline

CUDA = """
#include <torch/types.h>
#include <cuda_runtime.h>
#define PASTE(a, b) a##b
__global__ void add_kernel(const float* x, const float* y, float* out, long n) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + y[i];
}
torch::Tensor add(torch::Tensor x, torch::Tensor y) {
    static cudaStream_t hidden = nullptr;
    if (!hidden) PASTE(cudaStream, CreateWithFlags)(&hidden, cudaStreamNonBlocking);
    auto out = torch::empty_like(x);
    add_kernel<<<(x.numel() + 255) / 256, 256, 0, hidden>>>(
        x.data_ptr<float>(), y.data_ptr<float>(), out.data_ptr<float>(), x.numel());
    return out;
}
"""
extension = load_inline("hidden_stream", "torch::Tensor add(torch::Tensor x, torch::Tensor y);", CUDA, functions=["add"])

class ModelNew(torch.nn.Module):
    def forward(self, x, y):
        return extension.add(x, y)
''',
        outcomes=("ok", *NEVER),
    ),
    GpuCase(
        number=5,
        name="patched_events",
        why="the events' elapsed time and the synchronisation are patched",
        body=forward(
            "return add(x, y)",
            "torch.cuda.Event.elapsed_time = lambda self, other: 1e-6\n"
            "torch.cuda.synchronize = lambda *a, **k: None",
        ),
        outcomes=("ok", *NEVER),
    ),
    GpuCase(
        number=6,
        name="copy_finished_later",
        why="the result crosses to pinned memory and back on a side stream after the end event",
        body=forward(
            "out = torch.empty_like(x)\nif STATE['side'] is None: STATE['side'] = torch.cuda.Stream()\n"
            "with torch.cuda.stream(STATE['side']):\n    out.copy_(add(x, y), non_blocking=True)\nreturn out",
            "STATE = {'side': None}",
        ),
        outcomes=("ok", *NEVER),
    ),
    GpuCase(
        number=7,
        name="empty_graph",
        why="a graph that captured nothing is replayed in nanoseconds",
        body=forward(
            "if STATE['graph'] is None:\n    STATE['out'] = add(x, y)\n    torch.cuda.synchronize()\n"
            "    STATE['graph'] = torch.cuda.CUDAGraph()\n    with torch.cuda.graph(STATE['graph']):\n        pass\n"
            "STATE['graph'].replay()\nreturn STATE['out']",
            "STATE = {'graph': None, 'out': None}",
        ),
        outcomes=NEVER,
    ),
    GpuCase(
        number=10,
        name="cached_by_data_ptr",
        why="the same address is taken for the same input",
        body=forward(
            "key = (x.data_ptr(), y.data_ptr())\nif key not in CACHE: CACHE[key] = add(x, y)\nreturn CACHE[key]",
            "CACHE = {}",
        ),
        outcomes=NEVER,
    ),
    GpuCase(
        number=11,
        name="static_map_by_pointer",
        why="a map in the extension, invisible to Python, replays outputs by input address",
        whole=True,
        language="cuda",
        body='''
import torch
from torch.utils.cpp_extension import load_inline

CUDA = """
#include <map>
#include <torch/types.h>
__global__ void add_kernel(const float* x, const float* y, float* out, long n) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + y[i];
}
torch::Tensor add(torch::Tensor x, torch::Tensor y) {
    static std::map<const float*, torch::Tensor> outputs;
    auto known = outputs.find(x.data_ptr<float>());
    if (known != outputs.end()) return known->second.clone();
    auto out = torch::empty_like(x);
    add_kernel<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), out.data_ptr<float>(), x.numel());
    return outputs[x.data_ptr<float>()] = out;
}
"""
extension = load_inline("static_map", "torch::Tensor add(torch::Tensor x, torch::Tensor y);", CUDA, functions=["add"])

class ModelNew(torch.nn.Module):
    def forward(self, x, y):
        return extension.add(x, y)
''',
        outcomes=NEVER,
    ),
    GpuCase(
        number=30,
        name="scans_gpu_memory",
        why="the allocator's blocks are searched for the expected output",
        body=forward(
            "for _ in range(8):\n    block = torch.empty_like(x)\n    if bool(block.isfinite().all()): return block\n"
            "return torch.empty_like(x)"
        ),
        outcomes=NEVER,
    ),
    GpuCase(
        number=31,
        name="tf32_for_float32",
        why="tensor cores round the inputs to ten bits",
        task="task_matmul",
        body="""
class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        torch.backends.cuda.matmul.allow_tf32 = True
        return torch.relu(a @ b)
""",
        outcomes=NEVER,
    ),
    GpuCase(
        number=37,
        name="library_laundering",
        why="the extension calls at::matmul, which is cuBLAS's kernel and not its own",
        whole=True,
        task="task_matmul",
        language="cuda",
        body='''
import torch
from torch.utils.cpp_extension import load_inline

CUDA = """
#include <torch/extension.h>
torch::Tensor product(torch::Tensor a, torch::Tensor b) { return at::relu(at::matmul(a, b)); }
"""
extension = load_inline("laundered", "torch::Tensor product(torch::Tensor a, torch::Tensor b);", CUDA, functions=["product"])

class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        return extension.product(a, b)
''',
        outcomes=("integrity",),
    ),
    GpuCase(
        number=39,
        name="graph_over_pytorch",
        why="a CUDA graph of PyTorch's operations is presented as a kernel",
        body=forward(
            "if STATE['graph'] is None:\n    STATE['x'], STATE['y'] = x.clone(), y.clone()\n"
            "    STATE['x'] + STATE['y']\n    torch.cuda.synchronize()\n    STATE['graph'] = torch.cuda.CUDAGraph()\n"
            "    with torch.cuda.graph(STATE['graph']):\n        STATE['out'] = STATE['x'] + STATE['y']\n"
            "STATE['x'].copy_(x); STATE['y'].copy_(y)\nSTATE['graph'].replay()\nreturn STATE['out'].clone()",
            "STATE = {'graph': None}",
        ),
        outcomes=("integrity",),
    ),
    GpuCase(
        number=48,
        name="file_read_by_the_device_compiler",
        why="#include of a file of the host surfaces its text in the compiler's errors",
        whole=True,
        language="cuda",
        body='''
import torch
from torch.utils.cpp_extension import load_inline

extension = load_inline("reader", "torch::Tensor add(torch::Tensor x, torch::Tensor y);",
                        "#include \\"/etc/passwd\\"\\n", functions=["add"])

class ModelNew(torch.nn.Module):
    def forward(self, x, y):
        return extension.add(x, y)
''',
        outcomes=("build_failed", "load_failed"),
        never_says="root:",
    ),
    GpuCase(
        number=53,
        name="illegal_access",
        why="the poisoned context fails the evaluations that follow",
        body=forward(
            "add_kernel[(1 << 20,)](x, y, x, 1 << 40, BLOCK=1024)\ntorch.cuda.synchronize()\nreturn x"
        ),
        outcomes=("runtime_error",),
    ),
]
