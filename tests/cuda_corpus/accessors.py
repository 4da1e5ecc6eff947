"""Kernels and host code that reach elements through accessors."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

PACKED_ELEMENTWISE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <vector>

template <typename scalar_t>
__device__ __forceinline__ scalar_t gate(scalar_t z) {
  return scalar_t(1.0) / (scalar_t(1.0) + exp(-z));
}

template <typename scalar_t>
__global__ void gated_update_kernel(
    const torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> gates,
    const torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> old_cell,
    torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> new_cell) {
  const int n = blockIdx.y;
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c < old_cell.size(1)) {
    const scalar_t f = gate(gates[n][c]);
    const scalar_t candidate = tanh(gates[n][c + old_cell.size(1)]);
    new_cell[n][c] = f * old_cell[n][c] + (scalar_t(1.0) - f) * candidate;
  }
}

torch::Tensor gated_update(torch::Tensor gates, torch::Tensor old_cell) {
  auto new_cell = torch::zeros_like(old_cell);
  const auto batch_size = old_cell.size(0);
  const auto state_size = old_cell.size(1);

  const int threads = 256;
  const dim3 blocks((state_size + threads - 1) / threads, batch_size);

  AT_DISPATCH_FLOATING_TYPES(gates.scalar_type(), "gated_update", ([&] {
    gated_update_kernel<scalar_t><<<blocks, threads>>>(
        gates.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
        old_cell.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
        new_cell.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>());
  }));
  return new_cell;
}
"""

cpp_source = "torch::Tensor gated_update(torch::Tensor gates, torch::Tensor old_cell);"

cell = load_inline(
    name="gated_update",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["gated_update"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, gates, cell_state):
        return cell.gated_update(gates, cell_state)
'''

PACKED_MATMUL = plain_module(
    name="matmul_accessor_ext",
    functions="matmul_accessor",
    cuda_source="""
#include <torch/extension.h>

using Matrix = torch::PackedTensorAccessor32<float, 2, torch::RestrictPtrTraits>;

__global__ void matmul_accessor_kernel(Matrix a, Matrix b, Matrix c) {
    int i = blockIdx.y * blockDim.y + threadIdx.y;
    int j = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < c.size(0) && j < c.size(1)) {
        float acc = 0.f;
        for (int k = 0; k < a.size(1); ++k) {
            acc += a[i][k] * b[k][j];
        }
        c[i][j] = acc;
    }
}

torch::Tensor matmul_accessor(torch::Tensor a, torch::Tensor b) {
    TORCH_CHECK(a.size(1) == b.size(0), "inner sizes differ: ", a.size(1), " and ", b.size(0));
    auto c = torch::zeros({a.size(0), b.size(1)}, a.options());
    const dim3 block(32, 8);
    const dim3 grid((b.size(1) + block.x - 1) / block.x, (a.size(0) + block.y - 1) / block.y);
    // accessors know the strides, so transposed operands need no copy
    matmul_accessor_kernel<<<grid, block>>>(
        a.packed_accessor32<float, 2, torch::RestrictPtrTraits>(),
        b.packed_accessor32<float, 2, torch::RestrictPtrTraits>(),
        c.packed_accessor32<float, 2, torch::RestrictPtrTraits>());
    return c;
}
""",
    cpp_source="torch::Tensor matmul_accessor(torch::Tensor a, torch::Tensor b);",
    args="a, b",
    forward="ext.matmul_accessor(a, b.t())",
)

ACCESSOR64 = plain_module(
    name="channel_softmax_accessor",
    functions="channel_softmax",
    cuda_source="""
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>

template <typename T>
__global__ void channel_softmax_kernel(const at::PackedTensorAccessor64<T, 4> x, at::PackedTensorAccessor64<T, 4> y) {
  const int w = blockIdx.x * blockDim.x + threadIdx.x;
  const int h = blockIdx.y;
  const int n = blockIdx.z;
  if (w >= x.size(3)) return;
  T top = x[n][0][h][w];
  for (int c = 1; c < x.size(1); ++c) top = x[n][c][h][w] > top ? x[n][c][h][w] : top;
  T sum = 0;
  for (int c = 0; c < x.size(1); ++c) {
    const T e = exp(x[n][c][h][w] - top);
    y[n][c][h][w] = e;
    sum += e;
  }
  for (int c = 0; c < x.size(1); ++c) y[n][c][h][w] /= sum;
}

at::Tensor channel_softmax(at::Tensor x) {
  at::Tensor y = at::empty_like(x);
  const dim3 grid((x.size(3) + 63) / 64, x.size(2), x.size(0));
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "channel_softmax", [&]() {
    channel_softmax_kernel<scalar_t><<<grid, 64, 0, c10::cuda::getCurrentCUDAStream()>>>(
        x.packed_accessor64<scalar_t, 4>(), y.packed_accessor64<scalar_t, 4>());
  });
  return y;
}
""",
    cpp_source="at::Tensor channel_softmax(at::Tensor x);",
    forward="ext.channel_softmax(x)",
)

HOST_ACCESSOR = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

# The taps of the filter stay on the host; they travel to the GPU as an argument of the kernel.
cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

struct Taps {
    float w[16];
    int count;
};

__global__ void smooth_rows(const float* x, float* y, Taps taps, int rows, int cols) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    int r = blockIdx.y;
    if (c >= cols) return;
    int half = taps.count / 2;
    float acc = 0.0f;
    for (int k = 0; k < taps.count; ++k) {
        int p = c + k - half;
        if (p >= 0 && p < cols) acc += taps.w[k] * x[(size_t)r * cols + p];
    }
    y[(size_t)r * cols + c] = acc;
}

torch::Tensor smooth(torch::Tensor x, torch::Tensor taps) {
    TORCH_CHECK(!taps.is_cuda(), "the taps are read on the host");
    TORCH_CHECK(taps.dim() == 1 && taps.numel() <= 16, "up to 16 taps are possible, got ", taps.numel());
    auto access = taps.accessor<float, 1>();
    Taps t{};
    t.count = access.size(0);
    for (int k = 0; k < t.count; ++k) t.w[k] = access[k];
    auto y = torch::empty_like(x);
    const int rows = x.size(0), cols = x.size(1);
    smooth_rows<<<dim3((cols + 255) / 256, rows), 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), t, rows, cols);
    return y;
}
"""

cpp_source = "torch::Tensor smooth(torch::Tensor x, torch::Tensor taps);"

filters = load_inline(
    name="smooth_rows", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["smooth"], verbose=False
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.taps = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1])  # not a buffer: stays on the CPU

    def forward(self, x):
        return filters.smooth(x.contiguous(), self.taps)
'''

SMOOTHED = """
def smoothed(x):
    padded, n = F.pad(x, (2, 2)), x.shape[1]
    near = padded[:, 1 : n + 1] + padded[:, 3 : n + 3]
    far = padded[:, :n] + padded[:, 4 : n + 4]
    return 0.4 * x + 0.2 * near + 0.1 * far

"""

CASES = [
    CorpusCase(
        name="gated_update_packed_accessors",
        task=stateless_task(
            "torch.sigmoid(gates[:, : c.shape[1]]) * c + (1 - torch.sigmoid(gates[:, : c.shape[1]])) * torch.tanh(gates[:, c.shape[1] :])",
            "torch.randn(400, 1402), torch.randn(400, 701)",
            "gates, c",
        ),
        candidate=PACKED_ELEMENTWISE,
        features=("accessor", "dispatch", "template", "zeros_like"),
    ),
    CorpusCase(
        name="matmul_packed_accessors",
        task=stateless_task("torch.matmul(a, b.T)", "torch.randn(333, 256), torch.randn(401, 256)", "a, b"),
        candidate=PACKED_MATMUL,
        features=("accessor", "matmul", "zeros", "checks"),
    ),
    CorpusCase(
        name="channel_softmax_accessor64",
        task=stateless_task("torch.softmax(x, dim=1)", "torch.randn(6, 19, 70, 90)"),
        candidate=ACCESSOR64,
        features=("accessor", "dispatch", "template", "stream", "at_tensor", "softmax"),
    ),
    CorpusCase(
        name="row_filter_host_accessor",
        task=stateless_task("smoothed(x)", "torch.randn(500, 1111)", before=SMOOTHED),
        candidate=HOST_ACCESSOR,
        features=("accessor", "host_accessor", "struct", "checks"),
    ),
]
