"""Candidates that call PyTorch's operators from C++ beside kernels of their own."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

ABS_DIFF_SUM = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void abs_diff_pow_kernel(const float* a, const float* b, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        float d = fabsf(a[i] - b[i]);
        out[i] = d * sqrtf(d);
    }
}

torch::Tensor distance_cuda(torch::Tensor a, torch::Tensor b) {
    auto powers = torch::empty_like(a);
    int n = a.numel();
    abs_diff_pow_kernel<<<(n + 255) / 256, 256>>>(
        a.data_ptr<float>(), b.data_ptr<float>(), powers.data_ptr<float>(), n);
    // the reduction is left to PyTorch
    return torch::sum(powers, 1);
}
"""

cpp_source = "torch::Tensor distance_cuda(torch::Tensor a, torch::Tensor b);"

distance = load_inline(
    name="distance_1p5",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["distance_cuda"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super(ModelNew, self).__init__()

    def forward(self, a, b):
        return distance.distance_cuda(a.contiguous(), b.contiguous())
'''

LINEAR_TASK = """
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x):
        return F.gelu(self.linear(x)) * 0.5


def get_inputs():
    return [torch.randn(1024, 200)]


def get_init_inputs():
    return [200, 700]
"""

MATMUL_EPILOGUE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>

__global__ void bias_gelu_half_kernel(float* __restrict__ y, const float* __restrict__ bias, int rows, int cols) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= cols) return;
  const float b = bias[c];
  for (int r = blockIdx.y; r < rows; r += gridDim.y) {
    const float v = y[r * cols + c] + b;
    y[r * cols + c] = 0.25f * v * (1.f + erff(v * 0.70710678f));
  }
}

at::Tensor linear_gelu_half(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  TORCH_CHECK(x.size(1) == weight.size(1), "x has ", x.size(1), " features, weight takes ", weight.size(1));
  at::Tensor y = at::matmul(x, weight.transpose(0, 1)).contiguous();
  const int rows = y.size(0), cols = y.size(1);
  const dim3 grid((cols + 127) / 128, rows < 512 ? rows : 512);
  bias_gelu_half_kernel<<<grid, 128, 0, at::cuda::getCurrentCUDAStream()>>>(y.data_ptr<float>(), bias.data_ptr<float>(), rows, cols);
  AT_CUDA_CHECK(cudaGetLastError());
  return y;
}
"""

cpp_source = "at::Tensor linear_gelu_half(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);"

fused = load_inline(
    name="linear_gelu_half",
    cpp_sources=[cpp_source],
    cuda_sources=[cuda_source],
    functions=["linear_gelu_half"],
    extra_cflags=["-O3"],
    extra_cuda_cflags=["-O3"],
)


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x):
        return fused.linear_gelu_half(x, self.linear.weight, self.linear.bias)
'''

CENTRED = plain_module(
    name="centre_and_scale",
    functions="centre",
    cuda_source="""
#include <torch/extension.h>

__global__ void centre_kernel(const float* x, const float* mean, float* y, float scale, long n) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = (x[i] - mean[0]) * scale;
}

torch::Tensor centre(torch::Tensor x, double scale) {
    auto mean = x.mean();              // a tensor of one element, which stays on the GPU
    auto y = torch::empty_like(x);
    const long n = x.numel();
    centre_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), mean.data_ptr<float>(), y.data_ptr<float>(), (float)scale, n);
    return y;
}
""",
    cpp_source="torch::Tensor centre(torch::Tensor x, double scale);",
    forward="ext.centre(x.contiguous(), 3.0)",
)

SOFTMAX_THEN_POSITION = plain_module(
    name="softmax_expected_position",
    functions="weighted_softmax",
    cuda_source="""
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void position_kernel(const float* __restrict__ p, float* __restrict__ out, int cols) {
    // every block weighs one row with 1, 2, 3, ... and adds it up
    __shared__ float sums[128];
    float acc = 0.0f;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) {
        acc += p[blockIdx.x * cols + c] * (c + 1);
    }
    sums[threadIdx.x] = acc;
    __syncthreads();
    for (int s = 64; s > 0; s >>= 1) {
        if (threadIdx.x < s) sums[threadIdx.x] += sums[threadIdx.x + s];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = sums[0];
}

torch::Tensor weighted_softmax(torch::Tensor x, double temperature) {
    auto probabilities = torch::softmax(x / temperature, /*dim=*/1).contiguous();
    auto out = torch::empty({x.size(0), 1}, x.options());
    position_kernel<<<x.size(0), 128>>>(probabilities.data_ptr<float>(), out.data_ptr<float>(), x.size(1));
    return out;
}
""",
    cpp_source="torch::Tensor weighted_softmax(torch::Tensor x, double temperature);",
    forward="ext.weighted_softmax(x, 2.0)",
    options="verbose=False",
)

ROW_SHARE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>

__global__ void share_kernel(const float* x, const float* sums, float* y, int rows, int cols, float eps)
{
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    const int r = blockIdx.y * blockDim.y + threadIdx.y;
    if (r < rows && c < cols)
        y[(size_t)r * cols + c] = cols * x[(size_t)r * cols + c] / (sums[r] + eps);
}

torch::Tensor row_share(torch::Tensor x, double eps)
{
    torch::Tensor sums = x.abs().sum(1);
    torch::Tensor y = torch::empty_like(x);
    const int rows = x.size(0), cols = x.size(1);
    const dim3 block(32, 8);
    const dim3 grid((cols + 31) / 32, (rows + 7) / 8);
    share_kernel<<<grid, block, 0, c10::cuda::getCurrentCUDAStream()>>>(
        x.data_ptr<float>(), sums.data_ptr<float>(), y.data_ptr<float>(), rows, cols, static_cast<float>(eps));
    return y;
}
"""

cpp_source = "torch::Tensor row_share(torch::Tensor x, double eps);"

share = load_inline(
    name="row_share",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["row_share"],
)


class ModelNew(nn.Module):
    def __init__(self, eps: float = 1e-3):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return share.row_share(x.contiguous(), self.eps)
'''

BY_THE_MAXIMUM = plain_module(
    name="fake_quantise",
    functions="fake_quantise",
    cuda_source="""
#include <torch/extension.h>
#include <cmath>

__global__ void quantise_kernel(const float* x, float* y, float scale, int levels, int64_t n) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < n) {
    // squares of what is left after scaling into [-levels, levels]
    const float v = x[i] / scale * levels;
    y[i] = v * fabsf(v) * 0.01f;
  }
}

torch::Tensor fake_quantise(torch::Tensor x, int64_t levels) {
  TORCH_CHECK(levels > 0, "levels must be positive");
  const float scale = x.abs().max().item<float>();     // waits for the GPU
  TORCH_CHECK(scale > 0.f && std::isfinite(scale), "cannot scale by ", scale);
  auto y = torch::empty_like(x);
  const int64_t n = x.numel();
  quantise_kernel<<<(n + 511) / 512, 512>>>(x.data_ptr<float>(), y.data_ptr<float>(), scale, levels, n);
  return y;
}
""",
    cpp_source="torch::Tensor fake_quantise(torch::Tensor x, int64_t levels);",
    forward="ext.fake_quantise(x.contiguous(), 16)",
)

BEFORE_SCALED = """
def scaled_square(x):
    v = x / x.abs().max() * 16
    return v * v.abs() * 0.01

"""

CASES = [
    CorpusCase(
        name="distance_summed_by_pytorch",
        task=stateless_task("(torch.abs(a - b) ** 1.5).sum(dim=1)", "torch.randn(800, 1001), torch.randn(800, 1001)", "a, b"),
        candidate=ABS_DIFF_SUM,
        features=("aten", "elementwise"),
    ),
    CorpusCase(
        name="matmul_of_pytorch_with_epilogue",
        task=LINEAR_TASK,
        candidate=MATMUL_EPILOGUE,
        features=("aten", "weights", "cuda_context", "stream", "cuda_check", "transpose", "at_tensor", "checks"),
    ),
    CorpusCase(
        name="centred_by_the_mean",
        task=stateless_task("(x - x.mean()) * 3.0", "torch.randn(1000, 1003) + 0.5"),
        candidate=CENTRED,
        features=("aten", "double_parameter"),
    ),
    CorpusCase(
        name="expected_position_after_softmax",
        task=stateless_task(
            "(torch.softmax(x / 2.0, dim=1) * torch.arange(1, x.shape[1] + 1, device=x.device)).sum(dim=1, keepdim=True)",
            "torch.randn(900, 515)",
        ),
        candidate=SOFTMAX_THEN_POSITION,
        features=("aten", "shared", "reduction", "operators_of_tensor", "double_parameter"),
    ),
    CorpusCase(
        name="share_of_the_row",
        task=stateless_task("x.shape[1] * x / (x.abs().sum(dim=1, keepdim=True) + 1e-3)", "torch.randn(1100, 620)"),
        candidate=ROW_SHARE,
        features=("aten", "stream", "double_parameter"),
    ),
    CorpusCase(
        name="scaled_by_the_maximum_on_the_host",
        task=stateless_task("scaled_square(x)", "torch.randn(900, 901)", before=BEFORE_SCALED),
        candidate=BY_THE_MAXIMUM,
        features=("aten", "item", "int64_parameter", "checks"),
    ),
]
