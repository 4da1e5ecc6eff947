"""Activations with parameters, by dispatch and in place."""

from tests.cuda_corpus.case import CorpusCase, stateless_task

LEAKY_RELU_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, negative_slope: float = 0.01):
        super(Model, self).__init__()
        self.negative_slope = negative_slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.leaky_relu(x, negative_slope=self.negative_slope)


def get_inputs():
    return [torch.randn(64, 16383)]


def get_init_inputs():
    return [0.2]
"""

LEAKY_RELU = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda.h>
#include <cuda_runtime.h>

// one thread per element
__global__ void leaky_relu_kernel(
    const float* __restrict__ input,
    float* __restrict__ output,
    const float negative_slope,
    const size_t total)
{
    const size_t tid = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (tid >= total) return;
    const float val = input[tid];
    output[tid] = (val >= 0.f) ? val : negative_slope * val;
}

at::Tensor leaky_relu_forward(at::Tensor input, double negative_slope)
{
    at::Tensor output = at::empty_like(input);
    const size_t total = input.numel();
    dim3 block(512);
    dim3 grid((total + block.x - 1) / block.x);
    leaky_relu_kernel<<<grid, block>>>(
        input.data_ptr<float>(),
        output.data_ptr<float>(),
        static_cast<float>(negative_slope),
        total);
    return output;
}
"""

cpp_source = """
#include <torch/extension.h>
at::Tensor leaky_relu_forward(at::Tensor input, double negative_slope);
"""

leaky = load_inline(
    name="leaky_relu_slope",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["leaky_relu_forward"],
)


class ModelNew(nn.Module):
    def __init__(self, negative_slope: float = 0.01):
        super(ModelNew, self).__init__()
        self.negative_slope = negative_slope

    def forward(self, x):
        return leaky.leaky_relu_forward(x.contiguous(), self.negative_slope)
'''

MISH_DISPATCH = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <vector>

namespace {

template <typename scalar_t>
__device__ __forceinline__ scalar_t softplus(scalar_t z) {
  return z > static_cast<scalar_t>(20) ? z : log1p(exp(z));
}

template <typename scalar_t>
__global__ void mish_cuda_kernel(
    const scalar_t* __restrict__ input,
    scalar_t* __restrict__ output,
    size_t n) {
  const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  if (i < n) {
    const scalar_t z = input[i];
    output[i] = z * tanh(softplus(z));
  }
}

}  // namespace

torch::Tensor mish_cuda(torch::Tensor input) {
  auto output = torch::zeros_like(input);
  const auto n = input.numel();
  const int threads = 1024;
  const dim3 blocks((n + threads - 1) / threads);

  AT_DISPATCH_FLOATING_TYPES(input.scalar_type(), "mish_cuda", ([&] {
    mish_cuda_kernel<scalar_t><<<blocks, threads>>>(
        input.data_ptr<scalar_t>(),
        output.data_ptr<scalar_t>(),
        n);
  }));
  return output;
}
"""

cpp_source = "torch::Tensor mish_cuda(torch::Tensor input);"

mish = load_inline(name="mish_dispatch", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["mish_cuda"], verbose=False)


class ModelNew(nn.Module):
    def __init__(self):
        super(ModelNew, self).__init__()
        self.mish = mish

    def forward(self, x):
        return self.mish.mish_cuda(x)
'''

HARDTANH_IN_PLACE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>

__global__ void clamp_inplace(float* data, float lo, float hi, long n) {
    long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] = fminf(fmaxf(data[i], lo), hi);
}

// Modifies its argument and returns nothing.
void hardtanh_inplace(torch::Tensor& x, float lo, float hi) {
    TORCH_CHECK(x.is_contiguous(), "hardtanh_inplace: tensor has to be contiguous");
    TORCH_CHECK(lo <= hi, "hardtanh_inplace: empty interval [", lo, ", ", hi, "]");
    const long n = x.numel();
    clamp_inplace<<<(n + 127) / 128, 128>>>(x.data_ptr<float>(), lo, hi, n);
}
"""

cpp_source = "void hardtanh_inplace(torch::Tensor& x, float lo, float hi);"

inplace_ops = load_inline(
    name="hardtanh_inplace_ext",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["hardtanh_inplace"],
)


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.clone()  # the caller keeps its tensor
        inplace_ops.hardtanh_inplace(out, -1.0, 1.0)
        return out
'''

CASES = [
    CorpusCase(
        name="leaky_relu_double_parameter",
        task=LEAKY_RELU_TASK,
        candidate=LEAKY_RELU,
        features=("elementwise", "at_tensor", "double_parameter"),
    ),
    CorpusCase(
        name="mish_dispatch",
        task=stateless_task("F.mish(x)", "torch.randn(700, 1111)"),
        candidate=MISH_DISPATCH,
        features=("elementwise", "dispatch", "template", "zeros_like"),
    ),
    CorpusCase(
        name="hardtanh_in_place_on_a_clone",
        task=stateless_task("F.hardtanh(x, -1.0, 1.0)", "torch.randn(333, 2049) * 2"),
        candidate=HARDTANH_IN_PLACE,
        features=("elementwise", "in_place", "reference_parameter", "void", "checks", "float_parameter"),
    ),
]
