"""Cumulative sums."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

CUMSUM_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, dim):
        super(Model, self).__init__()
        self.dim = dim

    def forward(self, x):
        return torch.cumsum(x, dim=self.dim)


def get_inputs():
    return [torch.randn(400, 3001)]


def get_init_inputs():
    return [1]
"""

CUMSUM_CUB = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>
#include <cub/block/block_scan.cuh>

// Each block scans one row, BLOCK_THREADS elements at a time, and carries the running total along.
template <int BLOCK_THREADS>
__global__ void cumsum_kernel(const float* __restrict__ x, float* __restrict__ y, int cols) {
    using BlockScan = cub::BlockScan<float, BLOCK_THREADS>;
    __shared__ typename BlockScan::TempStorage temp_storage;

    const float* row_in = x + (size_t)blockIdx.x * cols;
    float* row_out = y + (size_t)blockIdx.x * cols;
    float carry = 0.0f;

    for (int start = 0; start < cols; start += BLOCK_THREADS) {
        const int c = start + threadIdx.x;
        float value = c < cols ? row_in[c] : 0.0f;
        float total;
        BlockScan(temp_storage).InclusiveSum(value, value, total);
        if (c < cols) row_out[c] = carry + value;
        carry += total;
        __syncthreads();  // temp_storage is used again
    }
}

torch::Tensor cumsum_cuda(torch::Tensor x, int64_t dim) {
    TORCH_CHECK(x.dim() == 2 && (dim == 1 || dim == -1), "only the rows of a matrix can be scanned");
    auto input = x.contiguous();
    auto output = torch::empty_like(input);
    cumsum_kernel<256><<<input.size(0), 256>>>(input.data_ptr<float>(), output.data_ptr<float>(), input.size(1));
    cudaError_t err = cudaGetLastError();
    TORCH_CHECK(err == cudaSuccess, "CUDA kernel failed: ", cudaGetErrorString(err));
    return output;
}
"""

cpp_source = "torch::Tensor cumsum_cuda(torch::Tensor x, int64_t dim);"

cumsum = load_inline(
    name="cumsum_cub",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["cumsum_cuda"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self, dim):
        super(ModelNew, self).__init__()
        self.dim = dim

    def forward(self, x):
        return cumsum.cumsum_cuda(x, self.dim)
'''

EXCLUSIVE = plain_module(
    name="exclusive_scan",
    functions="exclusive_cumsum",
    cuda_source="""
#include <torch/extension.h>
#include <cuda_runtime.h>

// Hillis and Steele's scan with two buffers; a row fits into one block.
__global__ void exclusive_scan_kernel(const float* in, float* out, int n) {
    extern __shared__ float temp[];
    const int t = threadIdx.x;
    const size_t base = (size_t)blockIdx.x * n;
    int src = 0, dst = 1;

    // shift by one, so that the result is exclusive
    if (t < n) temp[t] = t > 0 ? in[base + t - 1] : 0.0f;
    __syncthreads();

    for (int offset = 1; offset < n; offset <<= 1) {
        if (t < n) {
            float v = temp[src * n + t];
            if (t >= offset) v += temp[src * n + t - offset];
            temp[dst * n + t] = v;
        }
        __syncthreads();
        src = 1 - src;
        dst = 1 - dst;
    }
    if (t < n) out[base + t] = temp[src * n + t];
}

torch::Tensor exclusive_cumsum(torch::Tensor in) {
    const int n = in.size(1);
    TORCH_CHECK(n <= 1024, "rows of more than 1024 elements are not supported, got ", n);
    auto out = torch::empty_like(in);
    const int threads = (n + 31) / 32 * 32;
    exclusive_scan_kernel<<<in.size(0), threads, 2 * n * sizeof(float)>>>(in.data_ptr<float>(), out.data_ptr<float>(), n);
    return out;
}
""",
    cpp_source="torch::Tensor exclusive_cumsum(torch::Tensor in);",
    forward="ext.exclusive_cumsum(x.contiguous())",
)

REVERSE_COLUMNS = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>

__global__ void reverse_cumsum_kernel(const float* x, float* y, int rows, int cols)
{
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= cols) return;
    double running = 0.0;   // one thread a column: precision costs nothing here
    for (int r = rows - 1; r >= 0; --r)
    {
        running += x[(long long)r * cols + c];
        y[(long long)r * cols + c] = static_cast<float>(running);
    }
}

void reverse_cumsum_out(const at::Tensor& x, at::Tensor& y)
{
    reverse_cumsum_kernel<<<(x.size(1) + 63) / 64, 64>>>(
        x.data_ptr<float>(), y.data_ptr<float>(), x.size(0), x.size(1));
}

at::Tensor reverse_cumsum(at::Tensor x)
{
    TORCH_CHECK(x.dim() == 2, "expected a matrix but got shape ", x.sizes());
    at::Tensor contiguous = x.is_contiguous() ? x : x.contiguous();
    at::Tensor y = at::empty_like(contiguous);
    reverse_cumsum_out(contiguous, y);
    return y;
}
"""

cpp_source = """
at::Tensor reverse_cumsum(at::Tensor x);
"""

_ext = None


def extension():
    global _ext
    if _ext is None:
        _ext = load_inline(
            name="reverse_cumsum_columns",
            cpp_sources=cpp_source,
            cuda_sources=cuda_source,
            functions=["reverse_cumsum"],
            extra_cuda_cflags=["-O3"],
            verbose=False,
        )
    return _ext


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.ext = extension()

    def forward(self, x):
        return self.ext.reverse_cumsum(x)
'''

CASES = [
    CorpusCase(
        name="cumsum_block_scan",
        task=CUMSUM_TASK,
        candidate=CUMSUM_CUB,
        features=("scan", "cub", "template", "get_last_error", "int64_parameter", "checks"),
    ),
    CorpusCase(
        name="exclusive_cumsum_two_buffers",
        task=stateless_task(
            "torch.cat((torch.zeros_like(x[:, :1]), torch.cumsum(x, dim=1)[:, :-1]), dim=1)", "torch.randn(1500, 510)"
        ),
        candidate=EXCLUSIVE,
        features=("scan", "dynamic_shared", "checks"),
    ),
    CorpusCase(
        name="reverse_cumsum_of_columns",
        task=stateless_task("torch.flip(torch.cumsum(torch.flip(x, (0,)), dim=0), (0,))", "torch.randn(257, 5001)"),
        candidate=REVERSE_COLUMNS,
        features=("scan", "double", "at_tensor", "is_contiguous", "out_parameter", "checks"),
    ),
]
