"""Reductions of rows and of a middle dimension."""

from tests.cuda_corpus.case import CorpusCase, stateless_task

ROW_SUM_TREE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void row_sum_kernel(const float* input, float* output, int cols) {
    extern __shared__ float sdata[];
    int row = blockIdx.x;
    int tid = threadIdx.x;

    // Each thread accumulates a strided part of the row
    float sum = 0.0f;
    for (int c = tid; c < cols; c += blockDim.x) {
        sum += input[row * cols + c];
    }
    sdata[tid] = sum;
    __syncthreads();

    // Tree reduction in shared memory
    for (int s = blockDim.x / 2; s > 0; s >>= 1) {
        if (tid < s) {
            sdata[tid] += sdata[tid + s];
        }
        __syncthreads();
    }

    if (tid == 0) {
        output[row] = sdata[0];
    }
}

torch::Tensor row_sum_cuda(torch::Tensor input) {
    const int rows = input.size(0);
    const int cols = input.size(1);
    auto output = torch::empty({rows, 1}, input.options());

    const int threads = 256;
    row_sum_kernel<<<rows, threads, threads * sizeof(float)>>>(
        input.data_ptr<float>(), output.data_ptr<float>(), cols
    );
    return output;
}
"""

cpp_source = "torch::Tensor row_sum_cuda(torch::Tensor input);"

row_sum = load_inline(
    name="row_sum",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["row_sum_cuda"],
    verbose=True,
)


class ModelNew(nn.Module):
    def __init__(self):
        super(ModelNew, self).__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return row_sum.row_sum_cuda(x)
'''

ROW_MEAN_WARP = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = r"""
#include <torch/extension.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

constexpr int kWarpSize = 32;
constexpr int kWarpsPerBlock = 8;

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

// one warp per row
__global__ __launch_bounds__(kWarpSize * kWarpsPerBlock)
void row_mean_kernel(const float* __restrict__ x, float* __restrict__ mean, int64_t rows, int64_t cols) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarpSize;
  if (row >= rows) return;
  const float* p = x + row * cols;
  float acc = 0.f;
  for (int64_t c = lane; c < cols; c += kWarpSize) acc += p[c];
  acc = warp_sum(acc);
  if (lane == 0) mean[row] = acc / static_cast<float>(cols);
}

torch::Tensor row_mean(const torch::Tensor& x) {
  TORCH_CHECK(x.dim() >= 1, "row_mean needs at least one dimension");
  const c10::cuda::CUDAGuard device_guard(x.device());
  const auto input = x.contiguous();
  const int64_t cols = input.size(-1);
  const int64_t rows = input.numel() / cols;
  std::vector<int64_t> shape = input.sizes().vec();
  shape.pop_back();
  auto mean = torch::empty(shape, input.options());
  const dim3 grid((rows + kWarpsPerBlock - 1) / kWarpsPerBlock);
  row_mean_kernel<<<grid, kWarpSize * kWarpsPerBlock, 0, c10::cuda::getCurrentCUDAStream()>>>(
      input.data_ptr<float>(), mean.data_ptr<float>(), rows, cols);
  return mean;
}
"""

cpp_source = r"""
#include <torch/extension.h>
torch::Tensor row_mean(const torch::Tensor& x);
"""

module = load_inline(
    name="row_mean_warp",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["row_mean"],
    extra_cflags=["-O3"],
    extra_cuda_cflags=["-O3", "--use_fast_math"],
    verbose=False,
)


class ModelNew(nn.Module):
    def forward(self, x):
        return module.row_mean(x)
'''

MAX_OVER_MIDDLE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

max_reduction_name = "max_dim1"

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>
#include <cfloat>

// input [batch, dim1, dim2] -> output [batch, dim2]; neighbouring threads read neighbouring columns
__global__ void max_dim1_kernel(const float* input, float* output, int dim1, int dim2) {
    int b = blockIdx.y;
    int j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j >= dim2) return;

    const float* base = input + (long long)b * dim1 * dim2 + j;
    float best = -FLT_MAX;
    #pragma unroll 4
    for (int i = 0; i < dim1; i++) {
        best = fmaxf(best, base[(long long)i * dim2]);
    }
    output[b * dim2 + j] = best;
}

torch::Tensor max_dim1_cuda(torch::Tensor input) {
    auto sizes = input.sizes();
    TORCH_CHECK(sizes.size() == 3, "Input must be 3D");
    int batch = sizes[0], dim1 = sizes[1], dim2 = sizes[2];
    auto output = torch::full({batch, dim2}, -FLT_MAX, input.options());
    dim3 block(128);
    dim3 grid((dim2 + 127) / 128, batch);
    max_dim1_kernel<<<grid, block>>>(input.data_ptr<float>(), output.data_ptr<float>(), dim1, dim2);
    return output;
}
"""

cpp_source = "torch::Tensor max_dim1_cuda(torch::Tensor input);"

max_reduction = load_inline(
    name=max_reduction_name,
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["max_dim1_cuda"],
    verbose=True,
)


class ModelNew(nn.Module):
    def __init__(self):
        super(ModelNew, self).__init__()
        self.max_reduction = max_reduction

    def forward(self, x):
        return self.max_reduction.max_dim1_cuda(x.contiguous())
'''

CASES = [
    CorpusCase(
        name="row_sum_shared_tree",
        task=stateless_task("torch.sum(x, dim=1, keepdim=True)", "torch.randn(2000, 999)"),
        candidate=ROW_SUM_TREE,
        features=("reduction", "dynamic_shared"),
    ),
    CorpusCase(
        name="row_mean_one_warp_a_row",
        task=stateless_task("torch.mean(x, dim=-1)", "torch.randn(16, 131, 517)"),
        candidate=ROW_MEAN_WARP,
        features=("reduction", "warp", "guard", "stream", "constexpr", "launch_bounds", "vector", "const_reference", "fast_math"),
    ),
    CorpusCase(
        name="max_over_the_middle",
        task=stateless_task("torch.max(x, dim=1)[0]", "torch.randn(16, 200, 300)"),
        candidate=MAX_OVER_MIDDLE,
        features=("reduction", "full", "sizes", "checks"),
    ),
]
