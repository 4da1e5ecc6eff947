"""Pooling."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

MAX_POOL_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, kernel_size: int, stride: int, padding: int, dilation: int):
        super(Model, self).__init__()
        self.maxpool = nn.MaxPool2d(kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)

    def forward(self, x):
        return self.maxpool(x)


def get_inputs():
    return [torch.randn(4, 16, 97, 101)]


def get_init_inputs():
    return [4, 2, 1, 2]
"""

MAX_POOL = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <cfloat>

template <typename scalar_t>
__global__ void max_pool2d_kernel(
    const scalar_t* __restrict__ input,
    scalar_t* __restrict__ output,
    const int planes,
    const int input_height, const int input_width,
    const int output_height, const int output_width,
    const int kernel_size, const int stride, const int padding, const int dilation)
{
    const int tid = blockIdx.x * blockDim.x + threadIdx.x;
    if (tid >= planes * output_height * output_width) return;

    const int ow = tid % output_width;
    const int oh = (tid / output_width) % output_height;
    const int plane = tid / (output_width * output_height);
    const scalar_t* in = input + static_cast<int64_t>(plane) * input_height * input_width;

    scalar_t max_val = -std::numeric_limits<scalar_t>::infinity();
    for (int kh = 0; kh < kernel_size; kh++) {
        for (int kw = 0; kw < kernel_size; kw++) {
            const int ih = oh * stride - padding + kh * dilation;
            const int iw = ow * stride - padding + kw * dilation;
            if (ih >= 0 && ih < input_height && iw >= 0 && iw < input_width) {
                max_val = max(max_val, in[ih * input_width + iw]);
            }
        }
    }
    output[tid] = max_val;
}

torch::Tensor max_pool2d_cuda_forward(torch::Tensor input, int kernel_size, int stride, int padding, int dilation) {
    const auto batch_size = input.size(0);
    const auto channels = input.size(1);
    const auto input_height = input.size(2);
    const auto input_width = input.size(3);

    const auto output_height = ((input_height + 2 * padding - dilation * (kernel_size - 1) - 1) / stride) + 1;
    const auto output_width = ((input_width + 2 * padding - dilation * (kernel_size - 1) - 1) / stride) + 1;

    auto output = torch::empty({batch_size, channels, output_height, output_width}, input.options());

    const int threads = 256;
    const int blocks = (batch_size * channels * output_height * output_width + threads - 1) / threads;

    AT_DISPATCH_FLOATING_TYPES(input.scalar_type(), "max_pool2d_cuda_forward", ([&] {
        max_pool2d_kernel<scalar_t><<<blocks, threads>>>(
            input.data_ptr<scalar_t>(),
            output.data_ptr<scalar_t>(),
            batch_size * channels,
            input_height, input_width,
            output_height, output_width,
            kernel_size, stride, padding, dilation);
    }));
    return output;
}
"""

cpp_source = """
torch::Tensor max_pool2d_cuda_forward(torch::Tensor input, int kernel_size, int stride, int padding, int dilation);
"""

max_pool2d = load_inline(
    name="max_pool2d_dispatch",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["max_pool2d_cuda_forward"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self, kernel_size: int, stride: int, padding: int, dilation: int):
        super(ModelNew, self).__init__()
        self.args = (kernel_size, stride, padding, dilation)

    def forward(self, x):
        return max_pool2d.max_pool2d_cuda_forward(x.contiguous(), *self.args)
'''

AVG_POOL = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = "torch::Tensor avg_pool2d(torch::Tensor in, int64_t k);"

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

// grid.z is the number of planes, each thread makes one output
__global__ void avg_pool_kernel(const float* in, float* out, int h, int w, int oh, int ow, int k) {
    const int x = blockIdx.x * blockDim.x + threadIdx.x;
    const int y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= ow || y >= oh) return;
    const float* plane = in + (size_t)blockIdx.z * h * w;
    float s = 0.f;
    for (int i = 0; i < k; ++i)
        for (int j = 0; j < k; ++j)
            s += plane[(y * k + i) * w + x * k + j];
    out[((size_t)blockIdx.z * oh + y) * ow + x] = s / (float)(k * k);
}

torch::Tensor avg_pool2d(torch::Tensor in, int64_t k) {
    TORCH_CHECK(in.dim() == 4, "avg_pool2d: 4 dimensions expected, got ", in.dim());
    TORCH_CHECK(k > 0, "avg_pool2d: kernel size must be positive");
    in = in.contiguous();
    const int64_t oh = in.size(2) / k, ow = in.size(3) / k;
    auto out = torch::empty({in.size(0), in.size(1), oh, ow}, in.options());
    dim3 block(32, 4);
    dim3 grid((ow + 31) / 32, (oh + 3) / 4, in.size(0) * in.size(1));
    avg_pool_kernel<<<grid, block>>>(in.data_ptr<float>(), out.data_ptr<float>(), in.size(2), in.size(3), oh, ow, k);
    return out;
}
"""

avg_pool = load_inline(
    name="avg_pool_2x2",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["avg_pool2d"],
)


class ModelNew(nn.Module):
    def __init__(self, kernel_size: int = 3):
        super(ModelNew, self).__init__()
        self.kernel_size = kernel_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return avg_pool.avg_pool2d(x, self.kernel_size)
'''

GLOBAL_AVERAGE = r"""
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = '''
#include <torch/extension.h>
#include <cub/cub.cuh>
#include <ATen/cuda/CUDAContext.h>

template <int THREADS>
__global__ void global_average(const float* __restrict__ x, float* __restrict__ out, int plane) {
  typedef cub::BlockReduce<float, THREADS, cub::BLOCK_REDUCE_WARP_REDUCTIONS> Reduce;
  __shared__ typename Reduce::TempStorage temp;
  const float* p = x + static_cast<size_t>(blockIdx.x) * plane;
  float sum = 0.f;
  for (int i = threadIdx.x; i < plane; i += THREADS) sum += p[i];
  sum = Reduce(temp).Sum(sum);
  if (threadIdx.x == 0) out[blockIdx.x] = sum / plane;
}

torch::Tensor global_avg_pool(torch::Tensor x) {
  TORCH_CHECK(x.is_contiguous(torch::MemoryFormat::Contiguous), "x must be NCHW-contiguous");
  const auto n = x.size(0), c = x.size(1);
  auto out = torch::empty({n, c, 1, 1}, x.options());
  const int plane = static_cast<int>(x.numel() / (n * c));
  if (plane >= 1024) {
    global_average<512><<<n * c, 512, 0, at::cuda::getCurrentCUDAStream()>>>(
        x.data_ptr<float>(), out.data_ptr<float>(), plane);
  } else {
    global_average<64><<<n * c, 64, 0, at::cuda::getCurrentCUDAStream()>>>(
        x.data_ptr<float>(), out.data_ptr<float>(), plane);
  }
  return out;
}
'''

cpp_source = 'torch::Tensor global_avg_pool(torch::Tensor x);'

pool = load_inline(name='global_avg_pool_cub', cpp_sources=cpp_source, cuda_sources=cuda_source,
                   functions={'global_avg_pool': 'mean of every plane'}, extra_cuda_cflags=['-O3'])


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return pool.global_avg_pool(x.contiguous())
"""

MAX_POOL_INDICES = plain_module(
    name="max_pool1d_with_indices",
    functions="max_pool1d",
    cuda_source="""
#include <torch/extension.h>
#include <tuple>

__global__ void max_pool1d_kernel(const float* x, float* y, int64_t* where, int L, int Lout, int k, int stride, int total) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= total) return;
  int row = i / Lout, t = i % Lout;
  const float* p = x + (int64_t)row * L + t * stride;
  float best = p[0];
  int arg = 0;
  for (int j = 1; j < k; ++j) {
    if (p[j] > best) {
      best = p[j];
      arg = j;
    }
  }
  y[i] = best;
  where[i] = t * stride + arg;
}

std::tuple<torch::Tensor, torch::Tensor> max_pool1d(torch::Tensor x, int64_t k, int64_t stride) {
  TORCH_CHECK(x.dim() == 3, "expected (N, C, L)");
  x = x.contiguous();
  const int64_t L = x.size(2), Lout = (L - k) / stride + 1;
  auto y = torch::empty({x.size(0), x.size(1), Lout}, x.options());
  auto where = torch::empty(y.sizes(), x.options().dtype(torch::kInt64));
  const int total = y.numel();
  max_pool1d_kernel<<<(total + 255) / 256, 256>>>(
      x.data_ptr<float>(), y.data_ptr<float>(), where.data_ptr<int64_t>(), L, Lout, k, stride, total);
  return std::make_tuple(y, where);
}
""",
    cpp_source="""
#include <tuple>
std::tuple<torch::Tensor, torch::Tensor> max_pool1d(torch::Tensor x, int64_t k, int64_t stride);
""",
    forward="ext.max_pool1d(x, 4, 3)",
)

CASES = [
    CorpusCase(
        name="max_pool2d_dispatch",
        task=MAX_POOL_TASK,
        candidate=MAX_POOL,
        features=("pooling", "dispatch", "template", "int_parameter"),
    ),
    CorpusCase(
        name="avg_pool2d_planes",
        task=stateless_task("F.avg_pool2d(x, 3)", "torch.randn(6, 20, 70, 101)"),
        candidate=AVG_POOL,
        features=("pooling", "int64_parameter", "checks"),
    ),
    CorpusCase(
        name="global_average_cub",
        task=stateless_task("F.adaptive_avg_pool2d(x, 1)", "torch.randn(16, 60, 35, 37)"),
        candidate=GLOBAL_AVERAGE,
        features=("pooling", "cub", "cuda_context", "stream", "template", "memory_format", "functions_dict"),
    ),
    CorpusCase(
        name="max_pool1d_tuple_of_two",
        task=stateless_task("F.max_pool1d(x, 4, 3, return_indices=True)", "torch.randn(8, 40, 1003)"),
        candidate=MAX_POOL_INDICES,
        features=("pooling", "tuple_result", "int64_output", "int64_parameter", "checks"),
    ),
]
