"""Candidates that no compiler takes, with the slips that models make."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

MISSING_SEMICOLON = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void sigmoid_kernel(const float* x, float* out, int size) {
    int idx = blockIdx.x * blockDim.x + threadIdx.x;
    if (idx < size) {
        float v = x[idx]
        out[idx] = 1.0f / (1.0f + expf(-v));
    }
}

torch::Tensor sigmoid_cuda(torch::Tensor x) {
    auto out = torch::empty_like(x);
    int size = x.numel();
    sigmoid_kernel<<<(size + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), size);
    return out;
}
"""

cpp_source = "torch::Tensor sigmoid_cuda(torch::Tensor x);"

sigmoid = load_inline(
    name="sigmoid_no_semicolon",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["sigmoid_cuda"],
    verbose=True,
)


class ModelNew(nn.Module):
    def __init__(self):
        super(ModelNew, self).__init__()

    def forward(self, x):
        return sigmoid.sigmoid_cuda(x)
'''

UNDECLARED = plain_module(
    name="undeclared_width",
    functions="column_scale",
    cuda_source="""
#include <torch/extension.h>

__global__ void column_scale_kernel(const float* x, const float* s, float* y, int rows, int cols) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    int r = blockIdx.y;
    if (c < cols) {
        y[r * width + c] = x[r * width + c] * s[c];
    }
}

torch::Tensor column_scale(torch::Tensor x, torch::Tensor s) {
    auto y = torch::empty_like(x);
    int rows = x.size(0), cols = x.size(1);
    dim3 grid((cols + 127) / 128, rows);
    column_scale_kernel<<<grid, 128>>>(x.data_ptr<float>(), s.data_ptr<float>(), y.data_ptr<float>(), rows, cols);
    return y;
}
""",
    cpp_source="torch::Tensor column_scale(torch::Tensor x, torch::Tensor s);",
    args="x, s",
    forward="ext.column_scale(x, s)",
)

TOO_FEW_ARGUMENTS = plain_module(
    name="launch_without_count",
    functions="relu6",
    cuda_source="""
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>

__global__ void relu6_kernel(const float* __restrict__ x, float* __restrict__ y, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = fminf(fmaxf(x[i], 0.f), 6.f);
}

torch::Tensor relu6(torch::Tensor x) {
  auto y = torch::empty_like(x);
  const int64_t n = x.numel();
  relu6_kernel<<<(n + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(x.data_ptr<float>(), y.data_ptr<float>());
  return y;
}
""",
    cpp_source="torch::Tensor relu6(torch::Tensor x);",
    forward="ext.relu6(x.contiguous())",
)

SHAPE_OF_PYTHON = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void row_sum_kernel(const float* x, float* out, int rows, int cols) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows) {
        float s = 0.0f;
        for (int c = 0; c < cols; ++c) s += x[row * cols + c];
        out[row] = s;
    }
}

torch::Tensor row_sum(torch::Tensor x) {
    const int rows = x.shape(0);
    const int cols = x.shape(1);
    auto out = torch::zeros({rows}, x.options());
    row_sum_kernel<<<(rows + 127) / 128, 128>>>(x.data_ptr<float>(), out.data_ptr<float>(), rows, cols);
    return out;
}
"""

cpp_source = "torch::Tensor row_sum(torch::Tensor x);"

ext = load_inline(name="row_sum_shape", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["row_sum"])


class ModelNew(nn.Module):
    def forward(self, x):
        return ext.row_sum(x)
'''

DEVICE_FROM_HOST = plain_module(
    name="device_function_on_host",
    functions="gaussian",
    cuda_source="""
#include <torch/extension.h>

__device__ float inverse_width(float sigma) {
    return 0.5f / (sigma * sigma);
}

__global__ void gaussian_kernel(const float* x, float* y, float k, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = expf(-k * x[i] * x[i]);
}

torch::Tensor gaussian(torch::Tensor x, float sigma) {
    auto y = torch::empty_like(x);
    const int n = x.numel();
    const float k = inverse_width(sigma);
    gaussian_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), k, n);
    return y;
}
""",
    cpp_source="torch::Tensor gaussian(torch::Tensor x, float sigma);",
    forward="ext.gaussian(x, 1.5)",
    options="verbose=False",
)

RUNTIME_TEMPLATE_ARGUMENT = plain_module(
    name="runtime_template_argument",
    functions="block_mean",
    cuda_source="""
#include <torch/extension.h>

template <int THREADS>
__global__ void mean_kernel(const float* x, float* out, int cols) {
    __shared__ float s[THREADS];
    float acc = 0.f;
    for (int c = threadIdx.x; c < cols; c += THREADS) acc += x[(size_t)blockIdx.x * cols + c];
    s[threadIdx.x] = acc;
    __syncthreads();
    for (int k = THREADS / 2; k > 0; k /= 2) {
        if (threadIdx.x < k) s[threadIdx.x] += s[threadIdx.x + k];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = s[0] / cols;
}

torch::Tensor block_mean(torch::Tensor x) {
    const int rows = x.size(0), cols = x.size(1);
    auto out = torch::empty({rows}, x.options());
    int threads = cols >= 512 ? 512 : 128;
    mean_kernel<threads><<<rows, threads>>>(x.data_ptr<float>(), out.data_ptr<float>(), cols);
    return out;
}
""",
    cpp_source="torch::Tensor block_mean(torch::Tensor x);",
    forward="ext.block_mean(x)",
)

MISSPELT = plain_module(
    name="misspelt_empty_like",
    functions="cube",
    cuda_source="""
#include <torch/extension.h>
#include <cuda.h>
#include <cuda_runtime.h>

template <typename scalar_t>
__global__ void cube_kernel(const scalar_t* x, scalar_t* y, size_t n) {
  const size_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * x[i] * x[i];
}

torch::Tensor cube(torch::Tensor x) {
  auto y = torch::empty_likee(x);
  const int threads = 256;
  const int blocks = (x.numel() + threads - 1) / threads;
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "cube", ([&] {
    cube_kernel<scalar_t><<<blocks, threads>>>(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), x.numel());
  }));
  return y;
}
""",
    cpp_source="torch::Tensor cube(torch::Tensor x);",
    forward="ext.cube(x)",
)

FOURTH_DIMENSION = plain_module(
    name="block_index_w",
    functions="scale_4d",
    cuda_source="""
#include <torch/extension.h>

// one block dimension for each dimension of the tensor
__global__ void scale_4d_kernel(const float* x, float* y, int C, int H, int W, float s) {
    int w = threadIdx.x;
    int h = blockIdx.x, c = blockIdx.y, n = blockIdx.z;
    int t = blockIdx.w;
    if (w < W) {
        int i = ((n * C + c) * H + h) * W + w + t;
        y[i] = x[i] * s;
    }
}

torch::Tensor scale_4d(torch::Tensor x, float s) {
    auto y = torch::empty_like(x);
    dim3 grid(x.size(2), x.size(1), x.size(0));
    scale_4d_kernel<<<grid, 128>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.size(1), x.size(2), x.size(3), s);
    return y;
}
""",
    cpp_source="torch::Tensor scale_4d(torch::Tensor x, float s);",
    forward="ext.scale_4d(x, 1.25)",
    options='extra_cuda_cflags=["-O3"]',
)

UNCLOSED_BRACE = r"""
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = '''
#include <torch/extension.h>
#include <c10/cuda/CUDAException.h>

__global__ void hard_sigmoid_kernel(const float* x, float* y, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) {
    const float v = x[i] / 6.f + 0.5f;
    if (v < 0.f) {
      y[i] = 0.f;
    } else {
      y[i] = v > 1.f ? 1.f : v;
  }
}

torch::Tensor hard_sigmoid(torch::Tensor x) {
  auto y = torch::empty_like(x);
  hard_sigmoid_kernel<<<1024, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
'''

cpp_source = 'torch::Tensor hard_sigmoid(torch::Tensor x);'

hs = load_inline(name='hard_sigmoid_brace', cpp_sources=cpp_source, cuda_sources=cuda_source, functions=['hard_sigmoid'])


class ModelNew(nn.Module):
    def forward(self, x):
        return hs.hard_sigmoid(x)
"""

NOT_DEFINED = plain_module(
    name="listed_but_not_defined",
    functions="log1p_forward log1p_inplace",
    cuda_source="""
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void log1p_kernel(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = log1pf(fabsf(x[i]));
}

torch::Tensor log1p_forward(torch::Tensor x) {
    auto y = torch::empty_like(x);
    int n = x.numel();
    log1p_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), n);
    return y;
}
""",
    cpp_source="""
torch::Tensor log1p_forward(torch::Tensor x);
void log1p_inplace(torch::Tensor x);
""",
    forward="ext.log1p_forward(x)",
)

MATRIX = "torch.randn(600, 801)"


def _broken(name: str, forward: str, candidate: str, *features: str, inputs: str = MATRIX, args: str = "x") -> CorpusCase:
    task = stateless_task(forward, inputs, args)
    return CorpusCase(name=name, task=task, candidate=candidate, meant="build_failed", features=("broken", *features))


CASES = [
    _broken("missing_semicolon", "torch.sigmoid(x)", MISSING_SEMICOLON, "syntax"),
    _broken("undeclared_variable", "x * s", UNDECLARED, "in_kernel", inputs=f"{MATRIX}, torch.randn(801)", args="x, s"),
    _broken("too_few_arguments_of_a_launch", "F.relu6(x)", TOO_FEW_ARGUMENTS, "launch", "stream"),
    _broken("method_that_tensors_lack", "x.sum(dim=1)", SHAPE_OF_PYTHON, "host_code"),
    _broken("device_function_called_by_the_host", "torch.exp(-x * x / (2 * 1.5 ** 2))", DEVICE_FROM_HOST, "host_code"),
    _broken("runtime_value_as_template_argument", "x.mean(dim=1)", RUNTIME_TEMPLATE_ARGUMENT, "template", "launch"),
    _broken("misspelt_function_of_torch", "x ** 3", MISSPELT, "host_code", "dispatch"),
    _broken("fourth_block_index", "x * 1.25", FOURTH_DIMENSION, "in_kernel", inputs="torch.randn(8, 16, 60, 100)"),
    _broken("unclosed_brace", "F.hardsigmoid(x)", UNCLOSED_BRACE, "syntax", "launch_check"),
    _broken("listed_function_without_definition", "torch.log1p(torch.abs(x))", NOT_DEFINED, "several_functions"),
]
