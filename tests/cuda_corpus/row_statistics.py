"""Variances and norms."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

VARIANCE_TWO_PASS = plain_module(
    name="row_variance",
    functions="row_variance",
    cuda_source="""
#include <torch/extension.h>
#include <cuda.h>
#include <cuda_runtime.h>

template <unsigned int BLOCK>
__device__ float block_sum(float value) {
    __shared__ float partial[BLOCK / 32];
    __shared__ float total;
    for (int o = 16; o > 0; o >>= 1) value += __shfl_down_sync(0xffffffff, value, o);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
        float t = 0.f;
        for (unsigned int w = 0; w < BLOCK / 32; ++w) t += partial[w];
        total = t;
    }
    __syncthreads();
    float result = total;
    __syncthreads();   // the shared variables are used again
    return result;
}

template <unsigned int BLOCK>
__global__ void variance_kernel(const float* x, float* var, int cols, float denominator) {
    const float* row = x + (size_t)blockIdx.x * cols;
    float s = 0.f;
    for (int i = threadIdx.x; i < cols; i += BLOCK) s += row[i];
    const float mean = block_sum<BLOCK>(s) / cols;
    float q = 0.f;
    for (int i = threadIdx.x; i < cols; i += BLOCK) {
        const float d = row[i] - mean;
        q += d * d;
    }
    q = block_sum<BLOCK>(q);
    if (threadIdx.x == 0) var[blockIdx.x] = q / denominator;
}

torch::Tensor row_variance(torch::Tensor x, bool unbiased) {
    TORCH_CHECK(x.dim() == 2);
    const int rows = x.size(0), cols = x.size(1);
    auto var = torch::empty({rows}, x.options());
    const float denominator = unbiased ? cols - 1 : cols;
    variance_kernel<256><<<rows, 256>>>(x.data_ptr<float>(), var.data_ptr<float>(), cols, denominator);
    return var;
}
""",
    cpp_source="torch::Tensor row_variance(torch::Tensor x, bool unbiased);",
    forward="ext.row_variance(x, True)",
)

TOTAL_SUM = r"""
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = '''
#include <torch/extension.h>
#include <cuda_runtime.h>
#include <algorithm>

__global__ void sum_squares_stage1(const float* __restrict__ x, double* __restrict__ partial, int64_t n) {
    __shared__ double cache[256];
    double acc = 0.0;
    const int64_t stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        const double v = x[i];
        acc += v * v;
    }
    cache[threadIdx.x] = acc;
    __syncthreads();
    for (int half = 128; half >= 1; half /= 2) {
        if (threadIdx.x < half) cache[threadIdx.x] += cache[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) partial[blockIdx.x] = cache[0];
}

__global__ void norm_stage2(const double* __restrict__ partial, float* __restrict__ out, int count) {
    __shared__ double cache[128];
    double acc = 0.0;
    for (int i = threadIdx.x; i < count; i += 128) acc += partial[i];
    cache[threadIdx.x] = acc;
    __syncthreads();
    for (int half = 64; half >= 1; half /= 2) {
        if (threadIdx.x < half) cache[threadIdx.x] += cache[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[0] = (float)sqrt(cache[0]);
}

torch::Tensor frobenius_norm(torch::Tensor x) {
    x = x.contiguous();
    const int64_t n = x.numel();
    const int blocks = (int)std::min<int64_t>(512, (n + 255) / 256);
    auto partial = torch::empty({blocks}, x.options().dtype(torch::kFloat64));
    auto out = torch::empty({}, x.options());
    sum_squares_stage1<<<blocks, 256>>>(x.data_ptr<float>(), partial.data_ptr<double>(), n);
    norm_stage2<<<1, 128>>>(partial.data_ptr<double>(), out.data_ptr<float>(), blocks);
    return out;
}
'''

cpp_source = 'torch::Tensor frobenius_norm(torch::Tensor x);'

frobenius = load_inline(
    name='frobenius',
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=['frobenius_norm'],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.op = frobenius

    def forward(self, x):
        # two launches: partial sums in double precision, then the root of their total
        return self.op.frobenius_norm(x)
"""

L1_NORMALISE = r'''
import torch
from torch import nn, Tensor
from torch.utils.cpp_extension import load_inline

cpp_source = """
at::Tensor l1_norm_rows(const at::Tensor& x);
at::Tensor l1_divide(const at::Tensor& x, const at::Tensor& norms, double scale);
"""

cuda_source = """
#include <torch/extension.h>

__global__ void l1_norm_kernel(const float* x, float* norms, int cols) {
  __shared__ float warp_sums[32];
  const float* row = x + blockIdx.x * (size_t)cols;
  float s = 0.f;
  for (int c = threadIdx.x; c < cols; c += blockDim.x) s += fabsf(row[c]);
  for (int d = 16; d; d >>= 1) s += __shfl_down_sync(~0u, s, d);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  if (lane == 0) warp_sums[warp] = s;
  __syncthreads();
  if (warp == 0) {
    s = lane < warps ? warp_sums[lane] : 0.f;
    for (int d = 16; d; d >>= 1) s += __shfl_down_sync(~0u, s, d);
    if (lane == 0) norms[blockIdx.x] = s;
  }
}

__global__ void divide_kernel(const float* x, const float* norms, float* y, int rows, int cols, float scale) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y;
  if (c < cols) y[r * (size_t)cols + c] = x[r * (size_t)cols + c] / norms[r] * scale;
}

at::Tensor l1_norm_rows(const at::Tensor& x) {
  auto norms = at::zeros({x.size(0)}, x.options());
  l1_norm_kernel<<<x.size(0), 512>>>(x.data_ptr<float>(), norms.data_ptr<float>(), x.size(1));
  return norms;
}

at::Tensor l1_divide(const at::Tensor& x, const at::Tensor& norms, double scale) {
  auto y = at::empty_like(x);
  const dim3 grid((x.size(1) + 255) / 256, x.size(0));
  divide_kernel<<<grid, 256>>>(x.data_ptr<float>(), norms.data_ptr<float>(), y.data_ptr<float>(), x.size(0), x.size(1), scale);
  return y;
}
"""

l1 = load_inline(
    "l1_normalise",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["l1_norm_rows", "l1_divide"],
)


class ModelNew(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        norms = l1.l1_norm_rows(x)
        return l1.l1_divide(x, norms, float(x.shape[1]))
'''

CASES = [
    CorpusCase(
        name="row_variance_two_passes",
        task=stateless_task("torch.var(x, dim=1)", "torch.randn(1500, 801)"),
        candidate=VARIANCE_TWO_PASS,
        features=("reduction", "template", "warp", "shared", "bool_parameter", "checks"),
    ),
    CorpusCase(
        name="frobenius_norm_in_double",
        task=stateless_task("torch.norm(x)", "torch.randn(1003, 997)"),
        candidate=TOTAL_SUM,
        features=("reduction", "double", "shared", "two_kernels", "scalar_output"),
    ),
    CorpusCase(
        name="l1_normalise_two_functions",
        task=stateless_task(
            "x / torch.sum(torch.abs(x), dim=1, keepdim=True) * x.shape[1]", "torch.randn(640, 1250)"
        ),
        candidate=L1_NORMALISE,
        features=("reduction", "warp", "several_functions", "at_tensor", "const_reference", "double_parameter"),
    ),
]
