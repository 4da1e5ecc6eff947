"""Convolutions, written out directly."""

from tests.cuda_corpus.case import CorpusCase

CONV2D_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding):
        super(Model, self).__init__()
        self.conv2d = nn.Conv2d(in_channels, out_channels, kernel_size, stride=stride, padding=padding)

    def forward(self, x):
        return self.conv2d(x)


def get_inputs():
    return [torch.randn(8, 6, 60, 52)]


def get_init_inputs():
    return [6, 20, 3, 2, 1]
"""

CONV2D = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void conv2d_kernel(
    const float* __restrict__ input, const float* __restrict__ weight, const float* __restrict__ bias, float* __restrict__ output,
    int batch_size, int in_channels, int in_h, int in_w,
    int out_channels, int kernel_size, int stride, int padding, int out_h, int out_w)
{
    int idx = blockIdx.x * blockDim.x + threadIdx.x;
    int total = batch_size * out_channels * out_h * out_w;
    if (idx >= total) return;

    int ow = idx % out_w;
    int oh = (idx / out_w) % out_h;
    int oc = (idx / (out_w * out_h)) % out_channels;
    int n = idx / (out_w * out_h * out_channels);

    float sum = bias[oc];
    for (int ic = 0; ic < in_channels; ++ic) {
        for (int kh = 0; kh < kernel_size; ++kh) {
            int ih = oh * stride - padding + kh;
            if (ih < 0 || ih >= in_h) continue;
            for (int kw = 0; kw < kernel_size; ++kw) {
                int iw = ow * stride - padding + kw;
                if (iw < 0 || iw >= in_w) continue;
                float x = input[((n * in_channels + ic) * in_h + ih) * in_w + iw];
                float w = weight[((oc * in_channels + ic) * kernel_size + kh) * kernel_size + kw];
                sum += x * w;
            }
        }
    }
    output[idx] = sum;
}

torch::Tensor conv2d_forward(torch::Tensor input, torch::Tensor weight, torch::Tensor bias, int stride, int padding) {
    TORCH_CHECK(input.is_cuda() && weight.is_cuda(), "tensors must be on the GPU");
    input = input.contiguous();
    weight = weight.contiguous();
    int batch_size = input.size(0), in_channels = input.size(1);
    int in_h = input.size(2), in_w = input.size(3);
    int out_channels = weight.size(0), kernel_size = weight.size(2);
    int out_h = (in_h + 2 * padding - kernel_size) / stride + 1;
    int out_w = (in_w + 2 * padding - kernel_size) / stride + 1;

    auto output = torch::empty({batch_size, out_channels, out_h, out_w}, input.options());
    int total = batch_size * out_channels * out_h * out_w;
    conv2d_kernel<<<(total + 255) / 256, 256>>>(
        input.data_ptr<float>(), weight.data_ptr<float>(), bias.data_ptr<float>(), output.data_ptr<float>(),
        batch_size, in_channels, in_h, in_w, out_channels, kernel_size, stride, padding, out_h, out_w);
    return output;
}
"""

cpp_source = """
torch::Tensor conv2d_forward(torch::Tensor input, torch::Tensor weight, torch::Tensor bias, int stride, int padding);
"""

conv2d_ext = load_inline(
    name="conv2d_ext", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["conv2d_forward"], verbose=True
)


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding):
        super(ModelNew, self).__init__()
        self.conv2d = nn.Conv2d(in_channels, out_channels, kernel_size, stride=stride, padding=padding)
        self.stride, self.padding = stride, padding

    def forward(self, x):
        return conv2d_ext.conv2d_forward(x, self.conv2d.weight, self.conv2d.bias, self.stride, self.padding)
'''

DEPTHWISE_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, channels, kernel_size):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, bias=False)

    def forward(self, x):
        return self.depthwise(x)


def get_inputs():
    return [torch.randn(4, 24, 75, 69)]


def get_init_inputs():
    return [24, 5]
"""

DEPTHWISE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = "at::Tensor depthwise(at::Tensor x, at::Tensor w);"
cuda_source = """
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/CUDAException.h>

constexpr int TX = 32, TY = 8;

// A block makes a TY x TX patch of one plane; the patch and its halo are staged in shared memory.
template <int K>
__global__ void depthwise_kernel(const float* __restrict__ x, const float* __restrict__ w, float* __restrict__ y,
                                 int channels, int height, int width) {
  constexpr int R = K / 2;
  __shared__ float patch[TY + 2 * R][TX + 2 * R];
  __shared__ float taps[K * K];
  const int plane = blockIdx.z, c = plane % channels;
  const float* src = x + (int64_t)plane * height * width;
  const int x0 = blockIdx.x * TX - R, y0 = blockIdx.y * TY - R;
  const int tid = threadIdx.y * TX + threadIdx.x;
  for (int i = tid; i < K * K; i += TX * TY) taps[i] = w[c * K * K + i];
  for (int i = tid; i < (TY + 2 * R) * (TX + 2 * R); i += TX * TY) {
    const int py = i / (TX + 2 * R), px = i % (TX + 2 * R);
    const int gy = y0 + py, gx = x0 + px;
    const bool inside = gy >= 0 && gy < height && gx >= 0 && gx < width;
    patch[py][px] = inside ? src[gy * width + gx] : 0.f;
  }
  __syncthreads();
  const int ox = blockIdx.x * TX + threadIdx.x, oy = blockIdx.y * TY + threadIdx.y;
  if (ox < width && oy < height) {
    float acc = 0.f;
#pragma unroll
    for (int i = 0; i < K; ++i)
#pragma unroll
      for (int j = 0; j < K; ++j) acc = fmaf(patch[threadIdx.y + i][threadIdx.x + j], taps[i * K + j], acc);
    y[(int64_t)plane * height * width + oy * width + ox] = acc;
  }
}

at::Tensor depthwise(at::Tensor x, at::Tensor w) {
  TORCH_CHECK(w.size(0) == x.size(1) && w.size(1) == 1, "weight must be [channels, 1, k, k]");
  x = x.contiguous();
  auto y = at::empty_like(x);
  const int n = x.size(0), c = x.size(1), h = x.size(2), wd = x.size(3);
  const dim3 block(TX, TY), grid((wd + TX - 1) / TX, (h + TY - 1) / TY, n * c);
  auto stream = c10::cuda::getCurrentCUDAStream();
  switch (w.size(2)) {
    case 3:
      depthwise_kernel<3><<<grid, block, 0, stream>>>(x.data_ptr<float>(), w.data_ptr<float>(), y.data_ptr<float>(), c, h, wd);
      break;
    case 5:
      depthwise_kernel<5><<<grid, block, 0, stream>>>(x.data_ptr<float>(), w.data_ptr<float>(), y.data_ptr<float>(), c, h, wd);
      break;
    default:
      TORCH_CHECK(false, "kernel size ", w.size(2), " is not built in");
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
"""

dw = load_inline(name="depthwise_halo", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["depthwise"])


class ModelNew(nn.Module):
    def __init__(self, channels, kernel_size):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, bias=False)

    def forward(self, x):
        return dw.depthwise(x, self.depthwise.weight)
'''

CONV1D_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, dilation):
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel_size, dilation=dilation)

    def forward(self, x):
        return torch.relu(self.conv(x))


def get_inputs():
    return [torch.randn(16, 8, 2001)]


def get_init_inputs():
    return [8, 12, 5, 3]
"""

CONV1D = r"""
import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

cuda_source = '''
#include <torch/extension.h>
#include <cuda_runtime.h>

#define THREADS 128

__global__ void conv1d_relu(const float* x, const float* w, const float* b, float* y,
                            int C, int L, int O, int K, int dilation, int Lout)
{
    extern __shared__ float filter[];          // the C * K weights of this output channel
    const int o = blockIdx.y, n = blockIdx.z;
    for (int i = threadIdx.x; i < C * K; i += THREADS)
        filter[i] = w[o * C * K + i];
    __syncthreads();

    const int t = blockIdx.x * THREADS + threadIdx.x;
    if (t < Lout)
    {
        float acc = b[o];
        for (int c = 0; c < C; ++c)
        {
            const float* channel = x + ((size_t)n * C + c) * L + t;
            for (int k = 0; k < K; ++k)
                acc += channel[k * dilation] * filter[c * K + k];
        }
        y[((size_t)n * O + o) * Lout + t] = fmaxf(acc, 0.0f);
    }
}

torch::Tensor conv1d_relu_cuda(torch::Tensor x, torch::Tensor w, torch::Tensor b, int64_t dilation)
{
    TORCH_CHECK(x.dim() == 3, "x must be (N, C, L), it has ", x.dim(), " dimensions");
    TORCH_CHECK(w.size(1) == x.size(1), "channel mismatch: ", w.size(1), " vs ", x.size(1));
    const auto N = x.size(0), C = x.size(1), L = x.size(2), O = w.size(0), K = w.size(2);
    const auto Lout = L - dilation * (K - 1);
    TORCH_CHECK(Lout > 0, "input of length ", L, " is too short");
    auto y = torch::empty({N, O, Lout}, x.options());
    const dim3 grid((Lout + THREADS - 1) / THREADS, O, N);
    conv1d_relu<<<grid, THREADS, C * K * sizeof(float)>>>(
        x.data_ptr<float>(), w.data_ptr<float>(), b.data_ptr<float>(), y.data_ptr<float>(),
        C, L, O, K, dilation, Lout);
    return y;
}
'''

cpp_source = '''
torch::Tensor conv1d_relu_cuda(torch::Tensor x, torch::Tensor w, torch::Tensor b, int64_t dilation);
'''

conv1d = load_inline(name='conv1d_relu_ext', cpp_sources=cpp_source, cuda_sources=cuda_source,
                     functions=['conv1d_relu_cuda'], extra_cflags=['-O3'], extra_cuda_cflags=['-O3'])


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, dilation):
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel_size, dilation=dilation)
        self.dilation = dilation

    def forward(self, x):
        return conv1d.conv1d_relu_cuda(x.contiguous(), self.conv.weight, self.conv.bias, self.dilation)
"""

POINTWISE_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1x1 = nn.Conv2d(in_channels, out_channels, kernel_size=1, bias=False)

    def forward(self, x):
        return self.conv1x1(x)


def get_inputs():
    return [torch.randn(10, 30, 45, 47)]


def get_init_inputs():
    return [30, 50]
"""

POINTWISE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

# A 1x1 convolution is a matrix product for each image: [O, C] x [C, H*W].
cuda_source = """
#include <torch/extension.h>

#define TILE 16

__global__ void pointwise_kernel(const float* x, const float* w, float* y, int C, int O, int P) {
    __shared__ float ws[TILE][TILE];
    __shared__ float xs[TILE][TILE];
    x += (long)blockIdx.z * C * P;
    y += (long)blockIdx.z * O * P;
    int o = blockIdx.y * TILE + threadIdx.y;
    int p = blockIdx.x * TILE + threadIdx.x;
    float acc = 0.0f;
    for (int c0 = 0; c0 < C; c0 += TILE) {
        int cw = c0 + threadIdx.x;
        int cx = c0 + threadIdx.y;
        ws[threadIdx.y][threadIdx.x] = (o < O && cw < C) ? w[o * C + cw] : 0.0f;
        xs[threadIdx.y][threadIdx.x] = (cx < C && p < P) ? x[cx * P + p] : 0.0f;
        __syncthreads();
        for (int i = 0; i < TILE; i++)
            acc += ws[threadIdx.y][i] * xs[i][threadIdx.x];
        __syncthreads();
    }
    if (o < O && p < P) y[o * P + p] = acc;
}

torch::Tensor pointwise_conv(torch::Tensor x, torch::Tensor weight) {
    auto w = weight.view({weight.size(0), -1}).contiguous();
    auto input = x.contiguous();
    const int N = input.size(0), C = input.size(1), H = input.size(2), W = input.size(3), O = w.size(0);
    TORCH_CHECK(w.size(1) == C, "weight has ", w.size(1), " input channels, x has ", C);
    auto y = torch::empty({N, O, H * W}, input.options());
    dim3 threads(TILE, TILE);
    dim3 grid((H * W + TILE - 1) / TILE, (O + TILE - 1) / TILE, N);
    pointwise_kernel<<<grid, threads>>>(input.data_ptr<float>(), w.data_ptr<float>(), y.data_ptr<float>(), C, O, H * W);
    return y.reshape({N, O, H, W});
}
"""

cpp_source = "torch::Tensor pointwise_conv(torch::Tensor x, torch::Tensor weight);"

pointwise = load_inline("pointwise_conv", cpp_source, cuda_source, functions=["pointwise_conv"], verbose=False)


class ModelNew(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1x1 = nn.Conv2d(in_channels, out_channels, kernel_size=1, bias=False)

    def forward(self, x):
        return pointwise.pointwise_conv(x, self.conv1x1.weight)
'''

CASES = [
    CorpusCase(
        name="conv2d_direct",
        task=CONV2D_TASK,
        candidate=CONV2D,
        features=("convolution", "weights", "int_parameter", "checks"),
    ),
    CorpusCase(
        name="conv2d_depthwise_with_halo",
        task=DEPTHWISE_TASK,
        candidate=DEPTHWISE,
        features=("convolution", "weights", "shared", "template", "switch", "stream", "launch_check", "at_tensor", "checks"),
    ),
    CorpusCase(
        name="conv1d_dilated_relu",
        task=CONV1D_TASK,
        candidate=CONV1D,
        features=("convolution", "weights", "dynamic_shared", "int64_parameter", "checks"),
    ),
    CorpusCase(
        name="conv2d_pointwise_tiled",
        task=POINTWISE_TASK,
        candidate=POINTWISE,
        features=("convolution", "weights", "shared", "view", "reshape", "checks"),
    ),
]
