"""Normalisation of channels and planes."""

from tests.cuda_corpus.case import CorpusCase, stateless_task

INSTANCE_NORM = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

template <int BLOCK>
__global__ void instance_norm_kernel(const float* __restrict__ x, float* __restrict__ y, int plane, float eps)
{
    __shared__ float sum[BLOCK];
    __shared__ float sq[BLOCK];
    const float* src = x + (size_t)blockIdx.x * plane;
    float* dst = y + (size_t)blockIdx.x * plane;
    float a = 0.0f, b = 0.0f;
    for (int i = threadIdx.x; i < plane; i += BLOCK)
    {
        a += src[i];
        b += src[i] * src[i];
    }
    sum[threadIdx.x] = a;
    sq[threadIdx.x] = b;
    __syncthreads();
#pragma unroll
    for (int s = BLOCK / 2; s > 0; s /= 2)
    {
        if (threadIdx.x < s)
        {
            sum[threadIdx.x] += sum[threadIdx.x + s];
            sq[threadIdx.x] += sq[threadIdx.x + s];
        }
        __syncthreads();
    }
    const float mean = sum[0] / plane;
    const float rstd = rsqrtf(sq[0] / plane - mean * mean + eps);
    for (int i = threadIdx.x; i < plane; i += BLOCK)
        dst[i] = (src[i] - mean) * rstd;
}

torch::Tensor instance_norm_cuda(torch::Tensor x, float eps)
{
    if (!x.is_contiguous())
        x = x.contiguous();
    auto y = torch::empty({x.size(0), x.size(1), x.size(2), x.size(3)}, x.options());
    int planes = x.size(0) * x.size(1);
    int plane = x.size(2) * x.size(3);
    instance_norm_kernel<256><<<planes, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), plane, eps);
    cudaDeviceSynchronize();
    return y;
}
"""

cpp_source = "torch::Tensor instance_norm_cuda(torch::Tensor x, float eps);"

instance_norm = load_inline(
    name="instance_norm_planes",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["instance_norm_cuda"],
    verbose=True,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 1e-5
        self.instance_norm = instance_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.instance_norm.instance_norm_cuda(x, self.eps)
'''

BATCH_NORM_TASK = """
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    \"\"\"Batch normalisation with stored statistics, then ReLU.\"\"\"

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels))
        self.bias = nn.Parameter(torch.randn(channels))
        self.register_buffer("running_mean", torch.randn(channels) * 0.1)
        self.register_buffer("running_var", torch.rand(channels) + 0.5)

    def forward(self, x):
        return F.relu(F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training=False))


def get_inputs():
    return [torch.randn(16, 33, 41, 43)]


def get_init_inputs():
    return [33]
"""

BATCH_NORM = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/Exceptions.h>

template <bool RELU>
__global__ void bn_inference(const float* __restrict__ x, const float* __restrict__ scale,
                             const float* __restrict__ shift, float* __restrict__ y, int channels, int plane) {
  // blockIdx.y numbers the planes of all images
  const int c = blockIdx.y % channels;
  const float a = scale[c], b = shift[c];
  const long base = (long)blockIdx.y * plane;
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < plane) {
    float v = fmaf(x[base + i], a, b);
    if constexpr (RELU) v = fmaxf(v, 0.f);
    y[base + i] = v;
  }
}

__global__ void fold_statistics(const float* mean, const float* var, const float* weight, const float* bias,
                                float* scale, float* shift, int channels, float eps) {
  const int c = threadIdx.x + blockIdx.x * blockDim.x;
  if (c < channels) {
    const float s = weight[c] / sqrtf(var[c] + eps);
    scale[c] = s;
    shift[c] = bias[c] - mean[c] * s;
  }
}

at::Tensor bn_relu(at::Tensor x, at::Tensor mean, at::Tensor var, at::Tensor weight, at::Tensor bias, double eps, bool relu) {
  const int channels = x.size(1);
  const int plane = x.stride(1);
  TORCH_CHECK(x.is_contiguous(), "bn_relu: NCHW-contiguous input needed, strides are ", x.strides());
  auto folded = at::empty({2, channels}, x.options());
  float* scale = folded.data_ptr<float>();
  float* shift = scale + channels;
  cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  fold_statistics<<<(channels + 63) / 64, 64, 0, stream>>>(
      mean.data_ptr<float>(), var.data_ptr<float>(), weight.data_ptr<float>(), bias.data_ptr<float>(), scale, shift, channels, eps);
  AT_CUDA_CHECK(cudaGetLastError());
  auto y = at::empty_like(x);
  const dim3 grid((plane + 127) / 128, x.size(0) * channels);
  if (relu) {
    bn_inference<true><<<grid, 128, 0, stream>>>(x.data_ptr<float>(), scale, shift, y.data_ptr<float>(), channels, plane);
  } else {
    bn_inference<false><<<grid, 128, 0, stream>>>(x.data_ptr<float>(), scale, shift, y.data_ptr<float>(), channels, plane);
  }
  AT_CUDA_CHECK(cudaGetLastError());
  return y;
}
"""

cpp_source = """
at::Tensor bn_relu(at::Tensor x, at::Tensor mean, at::Tensor var, at::Tensor weight, at::Tensor bias, double eps, bool relu);
"""

bn = load_inline(
    name="bn_relu_inference", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["bn_relu"], with_cuda=True
)


class ModelNew(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels))
        self.bias = nn.Parameter(torch.randn(channels))
        self.register_buffer("running_mean", torch.randn(channels) * 0.1)
        self.register_buffer("running_var", torch.rand(channels) + 0.5)

    def forward(self, x):
        return bn.bn_relu(x, self.running_mean, self.running_var, self.weight, self.bias, 1e-5, True)
'''

BATCH_NORM_TRAINING = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <vector>

__global__ void stats_kernel(const float* x, float* mean, float* rstd, int N, int C, int L, float eps) {
    int c = blockIdx.x;
    double s = 0, q = 0;
    for (int i = threadIdx.x; i < N * L; i += blockDim.x) {
        int n = i / L, l = i % L;
        double v = x[((size_t)n * C + c) * L + l];
        s += v;
        q += v * v;
    }
    __shared__ double ss[512], qq[512];
    ss[threadIdx.x] = s;
    qq[threadIdx.x] = q;
    __syncthreads();
    for (int k = blockDim.x / 2; k > 0; k >>= 1) {
        if (threadIdx.x < k) {
            ss[threadIdx.x] += ss[threadIdx.x + k];
            qq[threadIdx.x] += qq[threadIdx.x + k];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        double m = ss[0] / ((double)N * L);
        mean[c] = m;
        rstd[c] = 1.0 / sqrt(qq[0] / ((double)N * L) - m * m + eps);
    }
}

__global__ void normalise_kernel(const float* x, const float* mean, const float* rstd, float* y, int C, int L, int total) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < total) {
        int c = (i / L) % C;
        y[i] = (x[i] - mean[c]) * rstd[c];
    }
}

std::vector<torch::Tensor> channel_stats(torch::Tensor x, double eps) {
    int N = x.size(0), C = x.size(1), L = x.size(2);
    auto mean = torch::empty({C}, x.options());
    auto rstd = torch::empty({C}, x.options());
    stats_kernel<<<C, 512>>>(x.data_ptr<float>(), mean.data_ptr<float>(), rstd.data_ptr<float>(), N, C, L, (float)eps);
    return {mean, rstd};
}

torch::Tensor normalise(torch::Tensor x, torch::Tensor mean, torch::Tensor rstd) {
    auto y = torch::empty_like(x);
    int total = x.numel();
    normalise_kernel<<<(total + 255) / 256, 256>>>(x.data_ptr<float>(), mean.data_ptr<float>(), rstd.data_ptr<float>(),
                                                   y.data_ptr<float>(), x.size(1), x.size(2), total);
    return y;
}
"""

cpp_source = """
#include <vector>
std::vector<torch::Tensor> channel_stats(torch::Tensor x, double eps);
torch::Tensor normalise(torch::Tensor x, torch::Tensor mean, torch::Tensor rstd);
"""

bn_train = load_inline(
    name="batch_norm_training",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["channel_stats", "normalise"],
)


class ModelNew(nn.Module):
    def forward(self, x):
        mean, rstd = bn_train.channel_stats(x, 1e-5)
        return bn_train.normalise(x, mean, rstd)
'''

CASES = [
    CorpusCase(
        name="instance_norm_and_synchronise",
        task=stateless_task("F.instance_norm(x)", "torch.randn(8, 20, 53, 51)"),
        candidate=INSTANCE_NORM,
        features=("norm", "shared", "template", "device_synchronize", "float_parameter"),
    ),
    CorpusCase(
        name="batch_norm_inference_relu",
        task=BATCH_NORM_TASK,
        candidate=BATCH_NORM,
        features=("norm", "weights", "buffers", "cuda_context", "cuda_check", "stream", "stride", "if_constexpr", "bool_parameter"),
    ),
    CorpusCase(
        name="batch_norm_training_vector_result",
        task=stateless_task("F.batch_norm(x, None, None, training=True)", "torch.randn(20, 40, 700)"),
        candidate=BATCH_NORM_TRAINING,
        features=("norm", "double", "vector_result", "several_functions"),
    ),
]
