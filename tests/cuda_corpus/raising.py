"""Candidates that build and fail while they run."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

CHECK_FAILS = plain_module(
    name="column_multiple_of_128",
    functions="scale_columns",
    cuda_source="""
#include <torch/extension.h>
#include <c10/cuda/CUDAGuard.h>

__global__ void scale_columns_kernel(const float4* x, float4* y, float s, int per_row) {
  const int i = blockIdx.x * per_row + threadIdx.x;
  float4 v = x[i];
  v.x *= s; v.y *= s; v.z *= s; v.w *= s;
  y[i] = v;
}

torch::Tensor scale_columns(torch::Tensor x, double s) {
  const at::cuda::OptionalCUDAGuard device_guard(device_of(x));
  TORCH_CHECK(x.dim() == 2, "x must be a matrix");
  TORCH_CHECK(x.size(1) % 128 == 0 && x.size(1) <= 4096, "the number of columns must be a multiple of 128, got ", x.size(1));
  auto y = torch::empty_like(x);
  const int per_row = x.size(1) / 4;
  scale_columns_kernel<<<x.size(0), per_row>>>(
      reinterpret_cast<const float4*>(x.data_ptr<float>()), reinterpret_cast<float4*>(y.data_ptr<float>()), (float)s, per_row);
  return y;
}
""",
    cpp_source="torch::Tensor scale_columns(torch::Tensor x, double s);",
    forward="ext.scale_columns(x.contiguous(), 2.5)",
)

DOUBLE_POINTER = plain_module(
    name="double_pointer_of_floats",
    functions="negate_abs",
    cuda_source="""
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void negate_abs_kernel(const double* x, double* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = -fabs(x[i]);
}

torch::Tensor negate_abs(torch::Tensor x) {
    auto y = torch::empty_like(x);
    const int n = x.numel();
    negate_abs_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<double>(), y.data_ptr<double>(), n);
    return y;
}
""",
    cpp_source="torch::Tensor negate_abs(torch::Tensor x);",
    forward="ext.negate_abs(x)",
    options="verbose=False",
)

TOO_MANY_THREADS = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

__global__ void add_bias_kernel(const float* __restrict__ x, const float* __restrict__ bias, float* __restrict__ y,
                                int rows, int cols) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  const int r = blockIdx.y * blockDim.y + threadIdx.y;
  if (r < rows && c < cols) y[r * cols + c] = x[r * cols + c] + bias[c];
}

torch::Tensor add_bias(torch::Tensor x, torch::Tensor bias) {
  auto y = torch::empty_like(x);
  const int rows = x.size(0), cols = x.size(1);
  const dim3 block(64, 32);
  const dim3 grid((cols + block.x - 1) / block.x, (rows + block.y - 1) / block.y);
  add_bias_kernel<<<grid, block, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), bias.data_ptr<float>(), y.data_ptr<float>(), rows, cols);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
"""

cpp_source = "torch::Tensor add_bias(torch::Tensor x, torch::Tensor bias);"

ext = load_inline(name="add_bias_2048_threads", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["add_bias"])


class ModelNew(nn.Module):
    def forward(self, x, bias):
        return ext.add_bias(x.contiguous(), bias.contiguous())
'''

UNDEFINED_RESULT = plain_module(
    name="undefined_result",
    functions="clip_negative",
    cuda_source="""
#include <torch/extension.h>
#include <cuda_runtime.h>

template <typename T>
__global__ void clip_kernel(const T* x, T* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] < T(0) ? T(0) : x[i];
}

torch::Tensor clip_negative(torch::Tensor x) {
    torch::Tensor y;
    const int n = x.numel();
    if (x.scalar_type() == torch::kFloat64) {
        y = torch::empty_like(x);
        clip_kernel<double><<<(n + 255) / 256, 256>>>(x.data_ptr<double>(), y.data_ptr<double>(), n);
    }
    return y;
}
""",
    cpp_source="torch::Tensor clip_negative(torch::Tensor x);",
    forward="ext.clip_negative(x.view(-1)).view(x.shape)",
)

MATRIX = "torch.randn(1000, 1003)"

CASES = [
    CorpusCase(
        name="check_that_the_inputs_fail",
        task=stateless_task("x * 2.5", MATRIX),
        candidate=CHECK_FAILS,
        meant="runtime_error",
        features=("checks", "guard", "vectorised", "double_parameter"),
    ),
    CorpusCase(
        name="pointer_to_the_wrong_type",
        task=stateless_task("-torch.abs(x)", MATRIX),
        candidate=DOUBLE_POINTER,
        meant="runtime_error",
        features=("wrong_dtype", "elementwise"),
    ),
    CorpusCase(
        name="launch_with_too_many_threads",
        task=stateless_task("x + bias", f"{MATRIX}, torch.randn(1003)", "x, bias"),
        candidate=TOO_MANY_THREADS,
        meant="runtime_error",
        features=("launch_check", "stream"),
    ),
    CorpusCase(
        name="result_that_is_undefined",
        task=stateless_task("torch.relu(x)", MATRIX),
        candidate=UNDEFINED_RESULT,
        meant="runtime_error",
        features=("undefined_tensor", "template"),
    ),
]
