"""Functors, lambdas, constants of templates, and choices at compile time."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

FUNCTORS = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>

// Small functions that are put together at compile time, without intermediate tensors.
template <typename T>
struct Square {
  __device__ __forceinline__ T operator()(T v) const { return v * v; }
};

template <typename T>
struct Softplus {
  T beta;
  __device__ __forceinline__ T operator()(T v) const {
    const T z = v * beta;
    return z > T(20) ? v : log1p(exp(z)) / beta;
  }
};

template <typename F, typename G>
struct Compose {
  F outer;
  G inner;
  template <typename T>
  __device__ __forceinline__ T operator()(T v) const { return outer(inner(v)); }
};

template <typename T, typename Op>
__global__ void unary_kernel(const T* __restrict__ in, T* __restrict__ out, int64_t n, Op op) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<int64_t>(blockDim.x) * gridDim.x) {
    out[i] = op(in[i]);
  }
}

template <typename T, typename Op>
void launch_unary(const at::Tensor& in, at::Tensor& out, Op op) {
  const int64_t n = in.numel();
  const int block = 256;
  const int grid = static_cast<int>(std::min<int64_t>((n + block - 1) / block, 65535));
  unary_kernel<T, Op><<<grid, block, 0, c10::cuda::getCurrentCUDAStream()>>>(in.data_ptr<T>(), out.data_ptr<T>(), n, op);
}

at::Tensor squared_softplus(const at::Tensor& x, double beta) {
  auto in = x.contiguous();
  auto out = at::empty_like(in);
  AT_DISPATCH_FLOATING_TYPES(in.scalar_type(), "squared_softplus", [&] {
    Compose<Square<scalar_t>, Softplus<scalar_t>> op{{}, {static_cast<scalar_t>(beta)}};
    launch_unary<scalar_t>(in, out, op);
  });
  return out;
}
"""

cpp_source = "at::Tensor squared_softplus(const at::Tensor& x, double beta);"

functors = load_inline(
    name="composed_functors", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["squared_softplus"]
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = 2.0

    def forward(self, x):
        return functors.squared_softplus(x, self.beta)
'''

LAMBDAS = plain_module(
    name="extended_lambda_map",
    functions="damped_sine",
    cuda_source="""
#include <torch/extension.h>
#include <cuda_runtime.h>

template <typename F>
__global__ void map_kernel(const float* x, float* y, int n, F f) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = f(x[i]);
}

template <typename F>
void launch_map(const torch::Tensor& x, torch::Tensor& y, F f) {
    const int n = x.numel();
    map_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), n, f);
}

torch::Tensor damped_sine(torch::Tensor x, float frequency, float decay) {
    auto y = torch::empty_like(x);
    launch_map(x, y, [=] __device__ (float v) { return sinf(frequency * v) * expf(-decay * v * v); });
    return y;
}
""",
    cpp_source="torch::Tensor damped_sine(torch::Tensor x, float frequency, float decay);",
    forward="ext.damped_sine(x.contiguous(), 3.0, 0.25)",
    options='extra_cuda_cflags=["-O3", "--extended-lambda"]',
)

BLOCK_SIZE_SWITCH = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

// The classic unrolled reduction: the block size is a constant of the template.
template <unsigned int blockSize>
__device__ void warp_reduce(volatile float* s, unsigned int t) {
    if (blockSize >= 64) { s[t] += s[t + 32]; __syncwarp(); }
    float v = s[t];
    for (int o = 16; o > 0; o >>= 1) v += __shfl_down_sync(0xffffffff, v, o);
    if (t == 0) s[0] = v;
}

template <unsigned int blockSize>
__global__ void reduce_rows(const float* g_in, float* g_out, unsigned int n) {
    __shared__ float sdata[blockSize];
    const unsigned int tid = threadIdx.x;
    const float* row = g_in + (size_t)blockIdx.x * n;
    float acc = 0;
    for (unsigned int i = tid; i < n; i += blockSize) acc += row[i] * row[i];
    sdata[tid] = acc;
    __syncthreads();
    if constexpr (blockSize >= 512) { if (tid < 256) sdata[tid] += sdata[tid + 256]; __syncthreads(); }
    if constexpr (blockSize >= 256) { if (tid < 128) sdata[tid] += sdata[tid + 128]; __syncthreads(); }
    if constexpr (blockSize >= 128) { if (tid < 64) sdata[tid] += sdata[tid + 64]; __syncthreads(); }
    if (tid < 32) warp_reduce<blockSize>(sdata, tid);
    if (tid == 0) g_out[blockIdx.x] = sdata[0];
}

torch::Tensor row_sum_of_squares(torch::Tensor x) {
    const int rows = x.size(0);
    const unsigned int n = x.size(1);
    auto out = torch::empty({rows}, x.options());
    const float* in = x.data_ptr<float>();
    float* o = out.data_ptr<float>();
    unsigned int threads = 64;
    while (threads < n && threads < 512) threads *= 2;
    switch (threads) {
        case 512: reduce_rows<512><<<rows, 512>>>(in, o, n); break;
        case 256: reduce_rows<256><<<rows, 256>>>(in, o, n); break;
        case 128: reduce_rows<128><<<rows, 128>>>(in, o, n); break;
        case 64: reduce_rows<64><<<rows, 64>>>(in, o, n); break;
    }
    return out;
}
"""

cpp_source = "torch::Tensor row_sum_of_squares(torch::Tensor x);"

reduce = load_inline(
    name="row_squares_block_switch",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["row_sum_of_squares"],
    extra_cuda_cflags=["-O3"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return reduce.row_sum_of_squares(x.contiguous())
'''

BOOL_SWITCH = r"""
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = r'''
#include <torch/extension.h>
#include <c10/cuda/CUDAException.h>

// Turns two runtime conditions into compile-time constants.
#define WITH_FLAG(CONDITION, NAME, ...)   \
  [&] {                                   \
    if (CONDITION) {                      \
      constexpr bool NAME = true;         \
      return __VA_ARGS__();               \
    } else {                              \
      constexpr bool NAME = false;        \
      return __VA_ARGS__();               \
    }                                     \
  }()

template <bool kBias, bool kRelu>
__global__ void epilogue_kernel(const float* x, const float* bias, float* y, int rows, int cols) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= cols) return;
  float b = 0.f;
  if constexpr (kBias) b = bias[c];
  for (int r = blockIdx.y; r < rows; r += gridDim.y) {
    float v = x[static_cast<size_t>(r) * cols + c] + b;
    if constexpr (kRelu) v = v > 0.f ? v : 0.f;
    y[static_cast<size_t>(r) * cols + c] = v;
  }
}

torch::Tensor epilogue(torch::Tensor x, c10::optional<torch::Tensor> bias, bool relu) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "a contiguous matrix is expected");
  const int rows = x.size(0), cols = x.size(1);
  const float* b = nullptr;
  if (bias.has_value() && bias->defined()) {
    TORCH_CHECK(bias->numel() == cols, "bias has ", bias->numel(), " elements for ", cols, " columns");
    b = bias->data_ptr<float>();
  }
  auto y = torch::empty_like(x);
  const dim3 grid((cols + 127) / 128, std::min(rows, 256));
  WITH_FLAG(b != nullptr, kBias, [&] {
    WITH_FLAG(relu, kRelu, [&] {
      epilogue_kernel<kBias, kRelu><<<grid, 128>>>(x.data_ptr<float>(), b, y.data_ptr<float>(), rows, cols);
    });
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
'''

cpp_source = '''
torch::Tensor epilogue(torch::Tensor x, c10::optional<torch::Tensor> bias, bool relu);
'''

_ext = load_inline(name='flagged_epilogue', cpp_sources=cpp_source, cuda_sources=cuda_source, functions=['epilogue'],
                   verbose=False)


class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x):
        y = _ext.epilogue(x.contiguous(), self.bias, True)
        return _ext.epilogue(y, None, False)
"""

BIAS_RELU_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x):
        return torch.relu(x + self.bias)


def get_inputs():
    return [torch.randn(1030, 517)]


def get_init_inputs():
    return [517]
"""

ALIGNED_PACKS = plain_module(
    name="aligned_packs",
    functions="hadamard",
    cuda_source="""
#include <torch/extension.h>
#include <ATen/ceil_div.h>
#include <cstdint>

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T item[N];
};

template <typename T, int N>
__global__ void __launch_bounds__(256, 4) hadamard_kernel(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ c, int64_t n) {
  using P = Pack<T, N>;
  const int64_t i = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) * N;
  if (i + N <= n) {
    const P pa = *reinterpret_cast<const P*>(a + i);
    const P pb = *reinterpret_cast<const P*>(b + i);
    P pc;
#pragma unroll
    for (int k = 0; k < N; ++k) pc.item[k] = pa.item[k] * pb.item[k] + pa.item[k];
    *reinterpret_cast<P*>(c + i) = pc;
  } else {
    for (int64_t k = i; k < n; ++k) c[k] = a[k] * b[k] + a[k];
  }
}

static bool aligned(const void* p, size_t bytes) { return reinterpret_cast<std::uintptr_t>(p) % bytes == 0; }

torch::Tensor hadamard(torch::Tensor a, torch::Tensor b) {
  TORCH_CHECK(a.sizes() == b.sizes(), "shapes must agree");
  auto c = torch::empty_like(a);
  const float *pa = a.data_ptr<float>(), *pb = b.data_ptr<float>();
  float* pc = c.data_ptr<float>();
  const int64_t n = a.numel();
  if (aligned(pa, 16) && aligned(pb, 16) && aligned(pc, 16)) {
    hadamard_kernel<float, 4><<<at::ceil_div(n, int64_t{1024}), 256>>>(pa, pb, pc, n);
  } else {
    hadamard_kernel<float, 1><<<at::ceil_div(n, int64_t{256}), 256>>>(pa, pb, pc, n);
  }
  return c;
}
""",
    cpp_source="torch::Tensor hadamard(torch::Tensor a, torch::Tensor b);",
    args="a, b",
    forward="ext.hadamard(a.contiguous(), b.contiguous())",
)

CASES = [
    CorpusCase(
        name="composed_functors",
        task=stateless_task("F.softplus(x, beta=2.0) ** 2", "torch.randn(613, 1200)"),
        candidate=FUNCTORS,
        features=("functor", "template", "dispatch", "stream", "at_tensor", "grid_stride"),
    ),
    CorpusCase(
        name="device_lambda",
        task=stateless_task("torch.sin(3.0 * x) * torch.exp(-0.25 * x * x)", "torch.randn(555, 1301)"),
        candidate=LAMBDAS,
        features=("lambda", "extended_lambda", "template", "float_parameter"),
    ),
    CorpusCase(
        name="row_squares_block_size_switch",
        task=stateless_task("(x * x).sum(dim=1)", "torch.randn(1200, 700)"),
        candidate=BLOCK_SIZE_SWITCH,
        features=("template", "if_constexpr", "switch", "reduction", "shared"),
    ),
    CorpusCase(
        name="flags_to_constants_and_optional_bias",
        task=BIAS_RELU_TASK,
        candidate=BOOL_SWITCH,
        features=("template", "macros", "lambda", "if_constexpr", "optional", "bool_parameter", "weights", "launch_check", "checks"),
    ),
    CorpusCase(
        name="aligned_packs",
        task=stateless_task("a * b + a", "torch.randn(1001, 333), torch.randn(1001, 333)", "a, b"),
        candidate=ALIGNED_PACKS,
        features=("template", "vectorised", "launch_bounds", "ceil_div", "static_function", "checks"),
    ),
]
