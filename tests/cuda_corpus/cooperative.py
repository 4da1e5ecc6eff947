"""Kernels written with cooperative groups."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

ROW_NORMALISE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

namespace cg = cooperative_groups;

__global__ void normalize_kernel(const float* __restrict__ x, float* __restrict__ y, int rows, int cols, float eps) {
    cg::thread_block block = cg::this_thread_block();
    auto warp = cg::tiled_partition<32>(block);
    const int row = blockIdx.x * warp.meta_group_size() + warp.meta_group_rank();
    if (row >= rows) return;

    const float* in = x + static_cast<size_t>(row) * cols;
    float* out = y + static_cast<size_t>(row) * cols;
    float sq = 0.f;
    for (int c = warp.thread_rank(); c < cols; c += warp.size()) sq += in[c] * in[c];
    sq = cg::reduce(warp, sq, cg::plus<float>());
    const float scale = 1.f / fmaxf(sqrtf(sq), eps);
    for (int c = warp.thread_rank(); c < cols; c += warp.size()) out[c] = in[c] * scale;
}

torch::Tensor normalize(torch::Tensor x, double eps) {
    TORCH_CHECK(x.is_cuda() && x.dim() == 2, "a CUDA matrix is needed");
    auto input = x.contiguous();
    auto y = torch::empty_like(input);
    const int rows = input.size(0), cols = input.size(1);
    const int warps_per_block = 4;
    normalize_kernel<<<(rows + warps_per_block - 1) / warps_per_block, warps_per_block * 32>>>(
        input.data_ptr<float>(), y.data_ptr<float>(), rows, cols, static_cast<float>(eps));
    return y;
}
"""

cpp_source = "torch::Tensor normalize(torch::Tensor x, double eps);"

ops = load_inline(
    name="normalize_cg",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["normalize"],
    extra_cuda_cflags=["-O3"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return ops.normalize(x, 1e-12)
'''

SMALL_ROWS = plain_module(
    name="softmax_small_rows",
    functions="softmax16",
    cuda_source="""
#include <torch/extension.h>
#include <cooperative_groups.h>

using namespace cooperative_groups;

constexpr int WIDTH = 16;

template <typename Group>
__device__ float group_max(Group g, float v) {
  for (int i = g.size() / 2; i > 0; i /= 2) v = fmaxf(v, g.shfl_xor(v, i));
  return v;
}

template <typename Group>
__device__ float group_sum(Group g, float v) {
  for (int i = g.size() / 2; i > 0; i /= 2) v += g.shfl_xor(v, i);
  return v;
}

// Sixteen threads share a row of at most sixteen columns.
__global__ void softmax16_kernel(const float* x, float* y, int rows, int cols) {
  auto tile = tiled_partition<WIDTH>(this_thread_block());
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / WIDTH;
  const int col = tile.thread_rank();
  const bool there = row < rows && col < cols;
  const float v = there ? x[row * cols + col] : -1e30f;
  const float m = group_max(tile, v);
  const float e = there ? expf(v - m) : 0.f;
  const float s = group_sum(tile, e);
  if (there) y[row * cols + col] = e / s;
}

torch::Tensor softmax16(torch::Tensor x) {
  const int cols = x.size(-1), rows = x.numel() / cols;
  TORCH_CHECK(cols <= WIDTH, "rows of more than ", WIDTH, " columns do not fit");
  auto y = torch::empty(x.sizes().vec(), x.options());
  const int64_t threads = static_cast<int64_t>(rows) * WIDTH;
  softmax16_kernel<<<(threads + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), rows, cols);
  return y;
}
""",
    cpp_source="torch::Tensor softmax16(torch::Tensor x);",
    forward="ext.softmax16(x.contiguous())",
)

COUNT_POSITIVE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cooperative_groups.h>
#include <c10/cuda/CUDAStream.h>

namespace cg = cooperative_groups;

// The threads that found something elect one that adds for all of them.
__global__ void count_kernel(const float* x, int* counts, int cols, float threshold) {
  __shared__ int total;
  cg::thread_block block = cg::this_thread_block();
  if (block.thread_rank() == 0) total = 0;
  block.sync();
  const float* row = x + static_cast<size_t>(blockIdx.x) * cols;
  for (int c = threadIdx.x; c < cols; c += blockDim.x) {
    if (row[c] > threshold) {
      cg::coalesced_group active = cg::coalesced_threads();
      if (active.thread_rank() == 0) atomicAdd(&total, static_cast<int>(active.size()));
    }
  }
  block.sync();
  if (block.thread_rank() == 0) counts[blockIdx.x] = total;
}

torch::Tensor count_positive(torch::Tensor x, float threshold) {
  auto counts = torch::zeros({x.size(0)}, torch::TensorOptions().dtype(torch::kInt32).device(x.device()));
  count_kernel<<<x.size(0), 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), counts.data_ptr<int>(), x.size(1), threshold);
  return counts.to(torch::kInt64);
}
"""

cpp_source = "torch::Tensor count_positive(torch::Tensor x, float threshold);"

counting = load_inline(
    name="count_positive",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["count_positive"],
    with_cuda=True,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.threshold = 0.5

    def forward(self, x):
        return counting.count_positive(x.contiguous(), self.threshold)
'''

CASES = [
    CorpusCase(
        name="normalise_rows_tiled_partition",
        task=stateless_task("F.normalize(x, dim=1)", "torch.randn(2001, 515)"),
        candidate=ROW_NORMALISE,
        features=("cooperative_groups", "norm", "double_parameter", "checks"),
    ),
    CorpusCase(
        name="softmax_of_small_rows",
        task=stateless_task("torch.softmax(x, dim=-1)", "torch.randn(40, 1001, 13)"),
        candidate=SMALL_ROWS,
        features=("cooperative_groups", "softmax", "template", "constexpr", "checks"),
    ),
    CorpusCase(
        name="count_above_threshold",
        task=stateless_task("(x > 0.5).sum(dim=1)", "torch.randn(1300, 805)"),
        candidate=COUNT_POSITIVE,
        features=("cooperative_groups", "atomics", "int64_output", "tensor_options", "stream", "to_dtype", "float_parameter"),
    ),
]
