"""Layers fused with what comes after them."""

from tests.cuda_corpus.case import CorpusCase

LINEAR_DIVIDE_GELU_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    \"\"\"Linear layer, division by a constant, GELU.\"\"\"

    def __init__(self, in_features, out_features, divisor):
        super(Model, self).__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.divisor = divisor

    def forward(self, x):
        x = self.linear(x)
        x = x / self.divisor
        return torch.nn.functional.gelu(x)


def get_inputs():
    return [torch.randn(1024, 256)]


def get_init_inputs():
    return [256, 1000, 4.0]
"""

LINEAR_DIVIDE_GELU = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

# The GEMM stays with cuBLAS; everything after it is fused into one pass.
cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void divide_gelu_kernel(float* __restrict__ data, float inv_divisor, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) {
        float v = data[i] * inv_divisor;
        float cdf = 0.5f * (1.0f + erff(v * 0.7071067811865475f));
        data[i] = v * cdf;
    }
}

torch::Tensor divide_gelu(torch::Tensor x, float divisor) {
    TORCH_CHECK(divisor != 0.0f, "divisor must not be zero");
    int n = x.numel();
    int threads = 256;
    int blocks = (n + threads - 1) / threads;
    if (blocks > 4096) blocks = 4096;
    divide_gelu_kernel<<<blocks, threads>>>(x.data_ptr<float>(), 1.0f / divisor, n);
    return x;
}
"""

cpp_source = "torch::Tensor divide_gelu(torch::Tensor x, float divisor);"

fused = load_inline(
    name="divide_gelu_ext",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["divide_gelu"],
    verbose=False,
    extra_cflags=["-O3"],
    extra_cuda_cflags=["-O3"],
)


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, divisor):
        super(ModelNew, self).__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.divisor = divisor
        self.fused = fused

    def forward(self, x):
        x = self.linear(x)
        # works in place on the fresh output of the linear layer
        return self.fused.divide_gelu(x.contiguous(), self.divisor)
'''

CONV_MIN_BIAS_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, constant_value, bias_shape, scaling_factor):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.constant_value = constant_value
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.scaling_factor = scaling_factor

    def forward(self, x):
        x = self.conv(x)
        x = torch.clamp(x, max=self.constant_value)
        x = x + self.bias
        return x * self.scaling_factor


def get_inputs():
    return [torch.randn(16, 3, 64, 64)]


def get_init_inputs():
    return [3, 16, 3, 0.5, (16, 1, 1), 2.0]
"""

CONV_MIN_BIAS = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = """
torch::Tensor min_bias_scale(torch::Tensor x, torch::Tensor bias, float constant_value, float scaling_factor);
"""

cuda_source = """
#include <torch/extension.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <cmath>

__global__ void min_bias_scale_kernel(
    const float* __restrict__ x,
    const float* __restrict__ bias,
    float* __restrict__ y,
    float constant_value,
    float scaling_factor,
    int channels,
    int spatial,
    int total) {
  int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index < total) {
    int c = (index / spatial) % channels;
    float v = fminf(x[index], constant_value);
    y[index] = (v + bias[c]) * scaling_factor;
  }
}

torch::Tensor min_bias_scale(torch::Tensor x, torch::Tensor bias, float constant_value, float scaling_factor) {
  // x: [N, C, H, W], bias: [C, 1, 1]
  auto y = torch::empty_like(x);
  const int channels = x.size(1);
  const int spatial = x.size(2) * x.size(3);
  const int total = x.numel();
  TORCH_CHECK(bias.numel() == channels, "bias must have one value per channel");
  min_bias_scale_kernel<<<(total + 255) / 256, 256>>>(
      x.data_ptr<float>(), bias.data_ptr<float>(), y.data_ptr<float>(),
      constant_value, scaling_factor, channels, spatial, total);
  return y;
}
"""

epilogue = load_inline(
    name="conv_epilogue",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["min_bias_scale"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, constant_value, bias_shape, scaling_factor):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.constant_value = constant_value
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.scaling_factor = scaling_factor

    def forward(self, x):
        x = self.conv(x).contiguous()
        return epilogue.min_bias_scale(x, self.bias, self.constant_value, self.scaling_factor)
'''

SMALL_MLP_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, d_in, d_hidden, d_out):
        super().__init__()
        self.fc1 = nn.Linear(d_in, d_hidden)
        self.fc2 = nn.Linear(d_hidden, d_out)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


def get_inputs():
    return [torch.randn(5000, 48)]


def get_init_inputs():
    return [48, 80, 24]
"""

SMALL_MLP = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>

// One block per ROWS rows of the batch; inputs and hidden units stay in shared memory.
template <int ROWS>
__global__ void mlp_kernel(const float* x, const float* w1, const float* b1, const float* w2, const float* b2,
                           float* y, int n, int d_in, int d_hidden, int d_out) {
    extern __shared__ float buffer[];
    float* xs = buffer;                     // ROWS x d_in
    float* hs = buffer + ROWS * d_in;       // ROWS x d_hidden
    const int first = blockIdx.x * ROWS;
    const int here = min(ROWS, n - first);

    for (int i = threadIdx.x; i < here * d_in; i += blockDim.x)
        xs[i] = x[first * d_in + i];
    __syncthreads();

    for (int i = threadIdx.x; i < here * d_hidden; i += blockDim.x) {
        int r = i / d_hidden, h = i % d_hidden;
        float acc = b1[h];
        for (int k = 0; k < d_in; ++k) acc += xs[r * d_in + k] * w1[h * d_in + k];
        hs[r * d_hidden + h] = acc > 0.f ? acc : 0.f;
    }
    __syncthreads();

    for (int i = threadIdx.x; i < here * d_out; i += blockDim.x) {
        int r = i / d_out, o = i % d_out;
        float acc = b2[o];
        for (int k = 0; k < d_hidden; ++k) acc += hs[r * d_hidden + k] * w2[o * d_hidden + k];
        y[(first + r) * d_out + o] = acc;
    }
}

torch::Tensor mlp_forward(torch::Tensor x, torch::Tensor w1, torch::Tensor b1, torch::Tensor w2, torch::Tensor b2) {
    constexpr int rows_per_block = 16;
    int n = x.size(0), d_in = x.size(1), d_hidden = w1.size(0), d_out = w2.size(0);
    TORCH_CHECK(w1.size(1) == d_in && w2.size(1) == d_hidden, "layer sizes do not fit together");
    auto y = torch::empty({n, d_out}, x.options());
    size_t smem = rows_per_block * (d_in + d_hidden) * sizeof(float);
    mlp_kernel<rows_per_block><<<(n + rows_per_block - 1) / rows_per_block, 192, smem>>>(
        x.data_ptr<float>(), w1.data_ptr<float>(), b1.data_ptr<float>(), w2.data_ptr<float>(), b2.data_ptr<float>(),
        y.data_ptr<float>(), n, d_in, d_hidden, d_out);
    return y;
}
"""

cpp_source = """
torch::Tensor mlp_forward(torch::Tensor x, torch::Tensor w1, torch::Tensor b1, torch::Tensor w2, torch::Tensor b2);
"""

mlp = load_inline(name="mlp_fused", cpp_sources=[cpp_source], cuda_sources=[cuda_source], functions=["mlp_forward"])


class ModelNew(nn.Module):
    def __init__(self, d_in, d_hidden, d_out):
        super().__init__()
        self.fc1 = nn.Linear(d_in, d_hidden)
        self.fc2 = nn.Linear(d_hidden, d_out)

    def forward(self, x):
        return mlp.mlp_forward(x.contiguous(), self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)
'''

CASES = [
    CorpusCase(
        name="linear_then_divide_gelu",
        task=LINEAR_DIVIDE_GELU_TASK,
        candidate=LINEAR_DIVIDE_GELU,
        features=("fusion", "weights", "in_place", "float_parameter", "grid_stride"),
    ),
    CorpusCase(
        name="conv_then_min_bias_scale",
        task=CONV_MIN_BIAS_TASK,
        candidate=CONV_MIN_BIAS,
        features=("fusion", "weights", "float_parameter", "checks"),
    ),
    CorpusCase(
        name="mlp_in_shared_memory",
        task=SMALL_MLP_TASK,
        candidate=SMALL_MLP,
        features=("fusion", "weights", "dynamic_shared", "template", "constexpr"),
    ),
]
