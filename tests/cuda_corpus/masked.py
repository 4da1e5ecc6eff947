"""Kernels that take a mask of booleans."""

from tests.cuda_corpus.case import CorpusCase, stateless_task

MASKED_SOFTMAX = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

namespace {
constexpr int THREADS = 128;

__device__ float reduce_max(float v, float* scratch) {
    for (int o = 16; o > 0; o /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, o));
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = v;
    __syncthreads();
    v = scratch[0];
    for (int w = 1; w < THREADS / 32; ++w) v = fmaxf(v, scratch[w]);
    __syncthreads();
    return v;
}

__device__ float reduce_sum(float v, float* scratch) {
    for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(0xffffffff, v, o);
    if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = v;
    __syncthreads();
    v = 0.f;
    for (int w = 0; w < THREADS / 32; ++w) v += scratch[w];
    __syncthreads();
    return v;
}

// scores [batch * heads, q, k], keep [batch, k]
__global__ void kernel(const float* scores, const bool* keep, float* probs, int heads, int q, int k, float scale) {
    __shared__ float scratch[THREADS / 32];
    const int query = blockIdx.x, bh = blockIdx.y;
    const float* s = scores + ((long)bh * q + query) * k;
    float* p = probs + ((long)bh * q + query) * k;
    const bool* m = keep + (long)(bh / heads) * k;

    float top = -1e30f;
    for (int j = threadIdx.x; j < k; j += THREADS)
        if (m[j]) top = fmaxf(top, s[j] * scale);
    top = reduce_max(top, scratch);
    float total = 0.f;
    for (int j = threadIdx.x; j < k; j += THREADS)
        if (m[j]) total += expf(s[j] * scale - top);
    total = reduce_sum(total, scratch);
    for (int j = threadIdx.x; j < k; j += THREADS)
        p[j] = m[j] ? expf(s[j] * scale - top) / total : 0.f;
}
}  // namespace

torch::Tensor masked_scaled_softmax(torch::Tensor scores, torch::Tensor keep, double scale) {
    TORCH_CHECK(keep.scalar_type() == torch::kBool, "keep must be a bool tensor, got ", keep.scalar_type());
    TORCH_CHECK(scores.dim() == 4, "scores must be [batch, heads, q, k]");
    auto s = scores.contiguous();
    auto m = keep.contiguous();
    auto probs = torch::empty_like(s);
    const int batch = s.size(0), heads = s.size(1), q = s.size(2), k = s.size(3);
    kernel<<<dim3(q, batch * heads), THREADS>>>(
        s.data_ptr<float>(), m.data_ptr<bool>(), probs.data_ptr<float>(), heads, q, k, static_cast<float>(scale));
    return probs;
}
"""

cpp_source = """
#include <torch/extension.h>

torch::Tensor masked_scaled_softmax(torch::Tensor scores, torch::Tensor keep, double scale);
"""

masked = load_inline(
    name="masked_softmax",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["masked_scaled_softmax"],
    extra_cflags=["-O2"],
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 0.125

    def forward(self, scores, keep):
        return masked.masked_scaled_softmax(scores, keep, self.scale)
'''

MASK = """
def some_kept(rows, columns):
    keep = torch.rand(rows, columns) > 0.3
    keep[:, 0] = True
    return keep

"""

MASKED = r"""
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = '''
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/CUDAException.h>

__device__ __forceinline__ float warp_inclusive_scan(float v, int lane) {
  #pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const float left = __shfl_up_sync(0xffffffffu, v, d);
    if (lane >= d) v += left;
  }
  return v;
}

__global__ void masked_cumsum_kernel(const float* __restrict__ x, const bool* __restrict__ mask,
                                     float* __restrict__ y, int rows, int cols) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x & 31;
  if (row >= rows) return;
  const int64_t base = static_cast<int64_t>(row) * cols;
  float carry = 0.f;
  for (int c0 = 0; c0 < cols; c0 += 32) {
    const int c = c0 + lane;
    float v = (c < cols && mask[base + c]) ? x[base + c] : 0.f;
    v = warp_inclusive_scan(v, lane) + carry;
    if (c < cols) y[base + c] = v;
    carry = __shfl_sync(0xffffffffu, v, 31);
  }
}

torch::Tensor masked_cumsum(const torch::Tensor& x, const torch::Tensor& mask) {
  TORCH_CHECK(x.sizes().equals(mask.sizes()), "x and mask differ in shape: ", x.sizes(), " vs. ", mask.sizes());
  TORCH_CHECK(mask.dtype() == torch::kBool, "mask must be boolean");
  const auto xc = x.contiguous();
  const auto mc = mask.contiguous();
  auto y = torch::zeros(xc.sizes(), xc.options());
  const int cols = xc.size(1), rows = xc.size(0);
  const int threads = 128;
  masked_cumsum_kernel<<<(rows * 32 + threads - 1) / threads, threads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      xc.data_ptr<float>(), mc.data_ptr<bool>(), y.data_ptr<float>(), rows, cols);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
'''

cpp_source = '''
torch::Tensor masked_cumsum(const torch::Tensor& x, const torch::Tensor& mask);
'''

scan = load_inline(name='masked_cumsum_warp', cpp_sources=cpp_source, cuda_sources=cuda_source, functions=['masked_cumsum'])


class ModelNew(nn.Module):
    def forward(self, x, mask):
        return scan.masked_cumsum(x, mask)
"""

CASES = [
    CorpusCase(
        name="masked_softmax_bool_mask",
        task=stateless_task(
            'torch.softmax((scores * 0.125).masked_fill(~keep[:, None, None, :], float("-inf")), dim=-1)',
            "torch.randn(4, 8, 100, 130), some_kept(4, 130)",
            "scores, keep",
            before=MASK,
        ),
        candidate=MASKED_SOFTMAX,
        features=("softmax", "bool_tensor", "warp", "double_parameter", "checks"),
    ),
    CorpusCase(
        name="masked_cumsum_warp",
        task=stateless_task(
            "torch.cumsum(x * mask, dim=1)", "torch.randn(1001, 530), torch.rand(1001, 530) > 0.4", "x, mask"
        ),
        candidate=MASKED,
        features=("scan", "warp", "bool_tensor", "stream", "launch_check", "const_reference", "checks"),
    ),
]
