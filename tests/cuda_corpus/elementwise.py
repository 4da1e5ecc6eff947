"""Elementwise kernels."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

RELU = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

# Simple element-wise ReLU in CUDA
cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void relu_kernel(const float* x, float* out, int size) {
    int idx = blockIdx.x * blockDim.x + threadIdx.x;
    if (idx < size) {
        out[idx] = x[idx] > 0.0f ? x[idx] : 0.0f;
    }
}

torch::Tensor relu_cuda(torch::Tensor x) {
    auto size = x.numel();
    auto out = torch::empty_like(x);

    const int block_size = 256;
    const int num_blocks = (size + block_size - 1) / block_size;

    relu_kernel<<<num_blocks, block_size>>>(x.data_ptr<float>(), out.data_ptr<float>(), size);

    return out;
}
"""

cpp_source = "torch::Tensor relu_cuda(torch::Tensor x);"

relu = load_inline(
    name="relu_ext",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["relu_cuda"],
    verbose=True,
    extra_cflags=[""],
    extra_ldflags=[""],
)


class ModelNew(nn.Module):
    def __init__(self):
        super(ModelNew, self).__init__()
        self.relu = relu

    def forward(self, x):
        return self.relu.relu_cuda(x)
'''

GELU_FLOAT4 = r'''
import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>
#include <math.h>

__device__ __forceinline__ float gelu_exact(float v) {
  return 0.5f * v * (1.0f + erff(v * 0.70710678118654752f));
}

__global__ void gelu_vec4_kernel(const float* __restrict__ in, float* __restrict__ out, int n4, int n) {
  const float4* in4 = reinterpret_cast<const float4*>(in);
  float4* out4 = reinterpret_cast<float4*>(out);
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n4) {
    float4 v = in4[i];
    v.x = gelu_exact(v.x);
    v.y = gelu_exact(v.y);
    v.z = gelu_exact(v.z);
    v.w = gelu_exact(v.w);
    out4[i] = v;
  }
  // up to three scalars remain
  int tail = n4 * 4 + i;
  if (i < 4 && tail < n) {
    out[tail] = gelu_exact(in[tail]);
  }
}

torch::Tensor gelu_forward(torch::Tensor input) {
  TORCH_CHECK(input.is_cuda(), "input must be a CUDA tensor");
  TORCH_CHECK(input.dtype() == torch::kFloat32, "only float32 is supported");
  input = input.contiguous();
  auto output = torch::empty_like(input);
  const int n = static_cast<int>(input.numel());
  const int n4 = n / 4;
  const int threads = 256;
  const int blocks = (n4 + threads - 1) / threads + 1;
  gelu_vec4_kernel<<<blocks, threads>>>(input.data_ptr<float>(), output.data_ptr<float>(), n4, n);
  return output;
}
"""

cpp_source = """
torch::Tensor gelu_forward(torch::Tensor input);
"""

gelu_module = load_inline(
    name="gelu_vec4",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["gelu_forward"],
    extra_cuda_cflags=["-O3"],
    verbose=False,
)


class ModelNew(nn.Module):
    """GELU with 128-bit loads and stores."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu_module.gelu_forward(x)
'''

SILU_GRID_STRIDE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = "torch::Tensor silu_forward(const torch::Tensor& x);"

cuda_source = """
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
#include <algorithm>

__global__ void silu_kernel(const float* __restrict__ x, float* __restrict__ y, int64_t n) {
  const int64_t stride = static_cast<int64_t>(blockDim.x) * gridDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) {
    const float v = x[i];
    y[i] = v / (1.f + __expf(-v));
  }
}

torch::Tensor silu_forward(const torch::Tensor& x) {
  TORCH_CHECK(x.is_cuda(), "x must live on the GPU, but it is on ", x.device());
  TORCH_CHECK(x.scalar_type() == torch::kFloat32, "expected float32, got ", x.scalar_type());
  auto xc = x.contiguous();
  auto y = torch::empty_like(xc);
  const int64_t n = xc.numel();
  const int threads = 256;
  const int sms = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  const int blocks = static_cast<int>(std::min<int64_t>((n + threads - 1) / threads, sms * 8));
  silu_kernel<<<blocks, threads, 0, at::cuda::getCurrentCUDAStream()>>>(
      xc.data_ptr<float>(), y.data_ptr<float>(), n);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
"""

_ext = load_inline(
    name="silu_grid_stride",
    cpp_sources=[cpp_source],
    cuda_sources=[cuda_source],
    functions=["silu_forward"],
    with_cuda=True,
    extra_cuda_cflags=["-O3", "--use_fast_math"],
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return _ext.silu_forward(x)
'''

SIGNED_SQRT = plain_module(
    name="signed_sqrt_ext",
    functions="signed_sqrt",
    cuda_source="""
#include <torch/extension.h>
#include <cuda_runtime.h>
#include <cmath>

#define CHECK_CUDA(x) TORCH_CHECK(x.device().is_cuda(), #x " must be a CUDA tensor")
#define CHECK_CONTIGUOUS(x) TORCH_CHECK(x.is_contiguous(), #x " must be contiguous")
#define CHECK_INPUT(x) CHECK_CUDA(x); CHECK_CONTIGUOUS(x)

__global__ void __launch_bounds__(256) signed_sqrt_kernel(const float* in, float* out, int rows, int cols) {
    int col = blockIdx.x * blockDim.x + threadIdx.x;
    int row = blockIdx.y;
    if (row < rows && col < cols) {
        float v = in[row * cols + col];
        out[row * cols + col] = copysignf(sqrtf(fabsf(v)), v);
    }
}

torch::Tensor signed_sqrt(torch::Tensor in) {
    CHECK_INPUT(in);
    TORCH_CHECK(in.dim() == 2, "signed_sqrt wants a matrix, got ", in.dim(), " dimensions");
    const int rows = in.size(0), cols = in.size(1);
    auto out = torch::empty({rows, cols}, in.options());
    dim3 threads(256);
    dim3 grid((cols + 255) / 256, rows);
    signed_sqrt_kernel<<<grid, threads>>>(in.data_ptr<float>(), out.data_ptr<float>(), rows, cols);
    return out;
}
""",
    cpp_source="torch::Tensor signed_sqrt(torch::Tensor in);",
    forward="ext.signed_sqrt(x)",
    options='extra_cflags=["-O3"]',
)

CASES = [
    CorpusCase(
        name="relu_first_try",
        task=stateless_task("torch.relu(x)", "torch.randn(1024, 1000)"),
        candidate=RELU,
        features=("elementwise", "empty_like"),
    ),
    CorpusCase(
        name="gelu_erf_float4",
        task=stateless_task("F.gelu(x)", "torch.randn(513, 1001)"),
        candidate=GELU_FLOAT4,
        features=("elementwise", "vectorised", "checks", "contiguous"),
    ),
    CorpusCase(
        name="silu_grid_stride",
        task=stateless_task("x * torch.sigmoid(x)", "torch.randn(8, 128, 1500)"),
        candidate=SILU_GRID_STRIDE,
        features=("elementwise", "cuda_context", "stream", "device_properties", "checks", "launch_check", "fast_math"),
    ),
    CorpusCase(
        name="signed_sqrt_with_check_macros",
        task=stateless_task("torch.sign(x) * torch.sqrt(torch.abs(x))", "torch.randn(777, 1023)"),
        candidate=SIGNED_SQRT,
        features=("elementwise", "macros", "checks", "launch_bounds"),
    ),
]
