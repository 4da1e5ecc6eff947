"""Candidates that build and run, and are wrong."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

LAST_COLUMN_LEFT_OUT = plain_module(
    name="row_mean_off_by_one",
    functions="row_mean",
    cuda_source="""
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void row_mean_kernel(const float* x, float* out, int rows, int cols) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows) {
        float sum = 0.0f;
        for (int c = 0; c < cols - 1; ++c) {
            sum += x[row * cols + c];
        }
        out[row] = sum / cols;
    }
}

torch::Tensor row_mean(torch::Tensor x) {
    const int rows = x.size(0), cols = x.size(1);
    auto out = torch::empty({rows}, x.options());
    row_mean_kernel<<<(rows + 63) / 64, 64>>>(x.data_ptr<float>(), out.data_ptr<float>(), rows, cols);
    return out;
}
""",
    cpp_source="torch::Tensor row_mean(torch::Tensor x);",
    forward="ext.row_mean(x)",
)

TAIL_NOT_WRITTEN = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void exp_scale_kernel(const float* x, float* out, float scale) {
    int idx = blockIdx.x * blockDim.x + threadIdx.x;
    out[idx] = expf(scale * x[idx]);
}

torch::Tensor exp_scale(torch::Tensor x, float scale) {
    auto out = torch::empty_like(x);
    const int threads = 256;
    const int blocks = x.numel() / threads;
    exp_scale_kernel<<<blocks, threads>>>(x.data_ptr<float>(), out.data_ptr<float>(), scale);
    return out;
}
"""

cpp_source = "torch::Tensor exp_scale(torch::Tensor x, float scale);"

ext = load_inline(
    name="exp_scale_tail",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["exp_scale"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return ext.exp_scale(x.contiguous(), 0.5)
'''

BIASED_VARIANCE = plain_module(
    name="std_biased",
    functions="row_std",
    cuda_source="""
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>

__global__ void std_kernel(const float* __restrict__ x, float* __restrict__ out, int rows, int cols) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  float s = 0.f;
  for (int c = lane; c < cols; c += 32) s += x[static_cast<int64_t>(row) * cols + c];
  for (int o = 16; o; o /= 2) s += __shfl_xor_sync(0xffffffff, s, o);
  const float mean = s / cols;
  float q = 0.f;
  for (int c = lane; c < cols; c += 32) {
    const float d = x[static_cast<int64_t>(row) * cols + c] - mean;
    q += d * d;
  }
  for (int o = 16; o; o /= 2) q += __shfl_xor_sync(0xffffffff, q, o);
  if (lane == 0) out[row] = sqrtf(q / cols);
}

torch::Tensor row_std(torch::Tensor x) {
  auto input = x.contiguous();
  const int rows = input.size(0), cols = input.size(1);
  auto out = torch::empty({rows}, input.options());
  std_kernel<<<(rows + 3) / 4, 128, 0, c10::cuda::getCurrentCUDAStream()>>>(
      input.data_ptr<float>(), out.data_ptr<float>(), rows, cols);
  return out;
}
""",
    cpp_source="torch::Tensor row_std(torch::Tensor x);",
    forward="ext.row_std(x)",
)

WRONG_EPS = plain_module(
    name="layer_norm_tiny_eps",
    functions="layer_norm",
    cuda_source="""
#include <torch/extension.h>

__global__ void layer_norm_kernel(const float* x, float* y, int cols, float eps) {
    __shared__ float a[128], b[128];
    const float* row = x + (size_t)blockIdx.x * cols;
    float s = 0.f, q = 0.f;
    for (int c = threadIdx.x; c < cols; c += 128) {
        s += row[c];
        q += row[c] * row[c];
    }
    a[threadIdx.x] = s;
    b[threadIdx.x] = q;
    __syncthreads();
    for (int k = 64; k > 0; k /= 2) {
        if (threadIdx.x < k) {
            a[threadIdx.x] += a[threadIdx.x + k];
            b[threadIdx.x] += b[threadIdx.x + k];
        }
        __syncthreads();
    }
    const float mean = a[0] / cols;
    const float rstd = rsqrtf(b[0] / cols - mean * mean + eps);
    for (int c = threadIdx.x; c < cols; c += 128) y[(size_t)blockIdx.x * cols + c] = (row[c] - mean) * rstd;
}

torch::Tensor layer_norm(torch::Tensor x) {
    TORCH_CHECK(x.dim() == 2 && x.is_contiguous());
    auto y = torch::empty_like(x);
    // eps should be 1e-5
    layer_norm_kernel<<<x.size(0), 128>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.size(1), 1e-12f);
    return y;
}
""",
    cpp_source="torch::Tensor layer_norm(torch::Tensor x);",
    forward="ext.layer_norm(x)",
)

REMAINDER_OF_K = r"""
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = '''
#include <torch/extension.h>
#include <cuda_runtime.h>

#define TILE 16

__global__ void matmul_kernel(const float* A, const float* B, float* C, int M, int N, int K) {
    __shared__ float As[TILE][TILE];
    __shared__ float Bs[TILE][TILE];
    int row = blockIdx.y * TILE + threadIdx.y;
    int col = blockIdx.x * TILE + threadIdx.x;
    float sum = 0.0f;
    for (int t = 0; t < K / TILE; ++t) {
        As[threadIdx.y][threadIdx.x] = row < M ? A[row * K + t * TILE + threadIdx.x] : 0.0f;
        Bs[threadIdx.y][threadIdx.x] = col < N ? B[(t * TILE + threadIdx.y) * N + col] : 0.0f;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) sum += As[threadIdx.y][k] * Bs[k][threadIdx.x];
        __syncthreads();
    }
    if (row < M && col < N) C[row * N + col] = sum;
}

torch::Tensor matmul(torch::Tensor A, torch::Tensor B) {
    const int M = A.size(0), K = A.size(1), N = B.size(1);
    auto C = torch::zeros({M, N}, A.options());
    dim3 block(TILE, TILE);
    dim3 grid((N + TILE - 1) / TILE, (M + TILE - 1) / TILE);
    matmul_kernel<<<grid, block>>>(A.data_ptr<float>(), B.data_ptr<float>(), C.data_ptr<float>(), M, N, K);
    return C;
}
'''

cpp_source = 'torch::Tensor matmul(torch::Tensor A, torch::Tensor B);'

mm = load_inline(name='matmul_remainder', cpp_sources=cpp_source, cuda_sources=cuda_source, functions=['matmul'])


class ModelNew(nn.Module):
    def forward(self, A, B):
        return mm.matmul(A.contiguous(), B.contiguous())
"""

LINEAR_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.relu(self.linear(x))


def get_inputs():
    return [torch.randn(700, 192)]


def get_init_inputs():
    return [192]
"""

WEIGHT_NOT_TRANSPOSED = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void linear_relu_kernel(const float* x, const float* w, const float* b, float* y, int m, int n, int k) {
    int i = blockIdx.y * blockDim.y + threadIdx.y;
    int j = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < m && j < n) {
        float acc = b[j];
        for (int q = 0; q < k; ++q) acc += x[i * k + q] * w[q * n + j];
        y[i * n + j] = fmaxf(acc, 0.0f);
    }
}

torch::Tensor linear_relu(torch::Tensor x, torch::Tensor w, torch::Tensor b) {
    const int m = x.size(0), k = x.size(1), n = w.size(0);
    auto y = torch::empty({m, n}, x.options());
    dim3 block(32, 8);
    dim3 grid((n + 31) / 32, (m + 7) / 8);
    linear_relu_kernel<<<grid, block>>>(
        x.data_ptr<float>(), w.data_ptr<float>(), b.data_ptr<float>(), y.data_ptr<float>(), m, n, k);
    return y;
}
"""

cpp_source = "torch::Tensor linear_relu(torch::Tensor x, torch::Tensor w, torch::Tensor b);"

ext = load_inline(name="linear_relu_layout", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["linear_relu"])


class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return ext.linear_relu(x, self.linear.weight, self.linear.bias)
'''

MATRIX = "torch.randn(1000, 1003)"

CASES = [
    CorpusCase(
        name="row_mean_without_the_last_column",
        task=stateless_task("x.mean(dim=1)", "torch.rand(900, 300)"),
        candidate=LAST_COLUMN_LEFT_OUT,
        meant="incorrect",
        features=("off_by_one", "reduction"),
    ),
    CorpusCase(
        name="tail_that_is_not_written",
        task=stateless_task("torch.exp(0.5 * x)", MATRIX),
        candidate=TAIL_NOT_WRITTEN,
        meant="incorrect",
        features=("no_boundary", "elementwise", "float_parameter"),
    ),
    CorpusCase(
        name="standard_deviation_with_the_wrong_divisor",
        task=stateless_task("x.std(dim=1)", "torch.randn(1000, 200)"),
        candidate=BIASED_VARIANCE,
        meant="incorrect",
        features=("wrong_reduction", "warp", "stream"),
    ),
    CorpusCase(
        name="layer_norm_with_the_wrong_eps",
        task=stateless_task("F.layer_norm(x, (x.shape[1],))", "torch.randn(800, 600) * 0.01"),
        candidate=WRONG_EPS,
        meant="incorrect",
        features=("wrong_eps", "norm", "shared"),
    ),
    CorpusCase(
        name="matmul_without_the_remainder",
        task=stateless_task("torch.matmul(A, B)", "torch.randn(300, 203), torch.randn(203, 400)", "A, B"),
        candidate=REMAINDER_OF_K,
        meant="incorrect",
        features=("no_remainder", "matmul", "shared", "macros"),
    ),
    CorpusCase(
        name="linear_with_weights_not_transposed",
        task=LINEAR_TASK,
        candidate=WEIGHT_NOT_TRANSPOSED,
        meant="incorrect",
        features=("wrong_layout", "matmul", "weights"),
    ),
]
