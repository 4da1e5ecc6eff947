"""Normalisation of rows and groups, with weights."""

from tests.cuda_corpus.case import CorpusCase

LAYER_NORM_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, normalized_shape):
        super(Model, self).__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return self.ln(x)


def get_inputs():
    return [torch.randn(6, 300, 515)]


def get_init_inputs():
    return [515]
"""

LAYER_NORM = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda.h>
#include <cuda_runtime.h>

__device__ __forceinline__ float2 block_reduce(float2 v, float2* shared) {
    const int lane = threadIdx.x % 32;
    const int wid = threadIdx.x / 32;

    #pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        v.x += __shfl_down_sync(0xffffffff, v.x, offset);
        v.y += __shfl_down_sync(0xffffffff, v.y, offset);
    }
    if (lane == 0) shared[wid] = v;
    __syncthreads();

    v = (threadIdx.x < blockDim.x / 32) ? shared[lane] : make_float2(0.f, 0.f);
    if (wid == 0) {
        #pragma unroll
        for (int offset = 16; offset > 0; offset >>= 1) {
            v.x += __shfl_down_sync(0xffffffff, v.x, offset);
            v.y += __shfl_down_sync(0xffffffff, v.y, offset);
        }
    }
    return v;
}

__global__ void layernorm_kernel(
    const float* __restrict__ input,
    const float* __restrict__ gamma,
    const float* __restrict__ beta,
    float* __restrict__ output,
    int hidden,
    float eps
) {
    __shared__ float2 shared[32];
    __shared__ float s_mean, s_rstd;

    const float* x = input + blockIdx.x * hidden;
    float* y = output + blockIdx.x * hidden;

    float2 acc = make_float2(0.f, 0.f);
    for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
        float v = x[i];
        acc.x += v;
        acc.y += v * v;
    }
    acc = block_reduce(acc, shared);

    if (threadIdx.x == 0) {
        float mean = acc.x / hidden;
        float var = fmaxf(acc.y / hidden - mean * mean, 0.f);
        s_mean = mean;
        s_rstd = rsqrtf(var + eps);
    }
    __syncthreads();

    for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
        y[i] = (x[i] - s_mean) * s_rstd * gamma[i] + beta[i];
    }
}

torch::Tensor layernorm_forward(torch::Tensor input, torch::Tensor gamma, torch::Tensor beta, double eps) {
    input = input.contiguous();
    const int hidden = input.size(-1);
    const int rows = input.numel() / hidden;
    auto output = torch::empty_like(input);

    int threads = 256;
    layernorm_kernel<<<rows, threads>>>(
        input.data_ptr<float>(), gamma.data_ptr<float>(), beta.data_ptr<float>(),
        output.data_ptr<float>(), hidden, static_cast<float>(eps));
    return output;
}
"""

cpp_source = """
torch::Tensor layernorm_forward(torch::Tensor input, torch::Tensor gamma, torch::Tensor beta, double eps = 1e-5);
"""

layernorm = load_inline(
    name="layernorm_ext",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["layernorm_forward"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super(ModelNew, self).__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return layernorm.layernorm_forward(x, self.ln.weight, self.ln.bias, self.ln.eps)
'''

RMS_NORM_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim))
        self.eps = eps

    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return x * scale * self.weight


def get_inputs():
    return [torch.randn(2, 256, 1024)]


def get_init_inputs():
    return [1024, 1e-6]
"""

RMS_NORM = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = "torch::Tensor rms_norm(torch::Tensor x, torch::Tensor weight, float eps);"
cuda_source = """
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>

template <int VEC, int THREADS>
__global__ void __launch_bounds__(THREADS) rms_norm_kernel(
    const float* __restrict__ x, const float* __restrict__ w, float* __restrict__ out, const int dim, const float eps) {
  static_assert(VEC == 4, "rows are read as float4");
  const float4* row = reinterpret_cast<const float4*>(x + (size_t)blockIdx.x * dim);
  const float4* w4 = reinterpret_cast<const float4*>(w);
  float4* dst = reinterpret_cast<float4*>(out + (size_t)blockIdx.x * dim);
  const int n4 = dim / VEC;

  float ss = 0.f;
  for (int i = threadIdx.x; i < n4; i += THREADS) {
    const float4 v = row[i];
    ss += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }

  __shared__ float warps[THREADS / 32];
  for (int o = 16; o > 0; o >>= 1) ss += __shfl_xor_sync(0xffffffff, ss, o);
  if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = ss;
  __syncthreads();
  float total = 0.f;
  #pragma unroll
  for (int k = 0; k < THREADS / 32; ++k) total += warps[k];
  const float r = rsqrtf(total / dim + eps);

  for (int i = threadIdx.x; i < n4; i += THREADS) {
    const float4 v = row[i], g = w4[i];
    dst[i] = make_float4(v.x * r * g.x, v.y * r * g.y, v.z * r * g.z, v.w * r * g.w);
  }
}

torch::Tensor rms_norm(torch::Tensor x, torch::Tensor weight, float eps) {
  const int dim = x.size(-1);
  TORCH_CHECK(dim % 4 == 0, "hidden size must be divisible by 4");
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous(), "x and weight must be contiguous");
  auto out = torch::empty_like(x);
  auto stream = c10::cuda::getCurrentCUDAStream().stream();
  rms_norm_kernel<4, 128><<<x.numel() / dim, 128, 0, stream>>>(
      x.data_ptr<float>(), weight.data_ptr<float>(), out.data_ptr<float>(), dim, eps);
  return out;
}
"""

rms = load_inline(name="rms_norm_vec", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["rms_norm"],
                  extra_cuda_cflags=["-O3", "--use_fast_math"])


class ModelNew(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim))
        self.eps = eps

    def forward(self, x):
        return rms.rms_norm(x.contiguous(), self.weight, self.eps)
'''

GROUP_NORM_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, num_features: int, num_groups: int):
        super(Model, self).__init__()
        self.gn = nn.GroupNorm(num_groups=num_groups, num_channels=num_features)

    def forward(self, x):
        return self.gn(x)


def get_inputs():
    return [torch.randn(8, 48, 37, 41)]


def get_init_inputs():
    return [48, 6]
"""

GROUP_NORM = r"""
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = '''
#include <torch/extension.h>
#include <cuda_runtime.h>

#define WARP_SIZE 32
#define FULL_MASK 0xffffffff

// Welford's update, so that nothing cancels
struct Stats { float mean; float m2; float n; };

__device__ Stats combine(Stats a, Stats b) {
    Stats r;
    r.n = a.n + b.n;
    if (r.n == 0.f) return a;
    const float delta = b.mean - a.mean;
    r.mean = a.mean + delta * (b.n / r.n);
    r.m2 = a.m2 + b.m2 + delta * delta * (a.n * b.n / r.n);
    return r;
}

__global__ void group_norm_kernel(const float* x, const float* weight, const float* bias, float* y,
                                  int channels, int groups, int hw, float eps) {
    __shared__ Stats stats[WARP_SIZE];
    const int per_group = channels / groups;
    const int count = per_group * hw;
    const int group = blockIdx.x % groups;
    const size_t base = (size_t)blockIdx.x * count;   // batches and groups lie one after another

    Stats s{0.f, 0.f, 0.f};
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const float v = x[base + i];
        s.n += 1.f;
        const float d = v - s.mean;
        s.mean += d / s.n;
        s.m2 += d * (v - s.mean);
    }
    for (int o = WARP_SIZE / 2; o > 0; o >>= 1) {
        Stats t;
        t.mean = __shfl_down_sync(FULL_MASK, s.mean, o);
        t.m2 = __shfl_down_sync(FULL_MASK, s.m2, o);
        t.n = __shfl_down_sync(FULL_MASK, s.n, o);
        s = combine(s, t);
    }
    if (threadIdx.x % WARP_SIZE == 0) stats[threadIdx.x / WARP_SIZE] = s;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < blockDim.x / WARP_SIZE; ++w) s = combine(s, stats[w]);
        stats[0] = s;
    }
    __syncthreads();
    const float mean = stats[0].mean;
    const float rstd = 1.0f / sqrtf(stats[0].m2 / stats[0].n + eps);
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const int c = group * per_group + i / hw;
        y[base + i] = (x[base + i] - mean) * rstd * weight[c] + bias[c];
    }
}

torch::Tensor group_norm(torch::Tensor x, torch::Tensor weight, torch::Tensor bias, int groups, float eps) {
    TORCH_CHECK(x.dim() == 4, "expected NCHW input");
    TORCH_CHECK(x.size(1) % groups == 0, x.size(1), " channels cannot be cut into ", groups, " groups");
    x = x.contiguous();
    auto y = torch::empty_like(x);
    const int n = x.size(0), c = x.size(1), hw = x.size(2) * x.size(3);
    group_norm_kernel<<<n * groups, 256>>>(x.data_ptr<float>(), weight.data_ptr<float>(), bias.data_ptr<float>(),
                                           y.data_ptr<float>(), c, groups, hw, eps);
    return y;
}
'''

cpp_source = '''
torch::Tensor group_norm(torch::Tensor x, torch::Tensor weight, torch::Tensor bias, int groups, float eps);
'''

gn_ext = load_inline(name='group_norm_welford', cpp_sources=cpp_source, cuda_sources=cuda_source,
                     functions=['group_norm'], verbose=False)


class ModelNew(nn.Module):
    def __init__(self, num_features: int, num_groups: int):
        super(ModelNew, self).__init__()
        self.gn = nn.GroupNorm(num_groups=num_groups, num_channels=num_features)
        self.num_groups = num_groups

    def forward(self, x):
        return gn_ext.group_norm(x, self.gn.weight, self.gn.bias, self.num_groups, self.gn.eps)
"""

CASES = [
    CorpusCase(
        name="layer_norm_float2_sums",
        task=LAYER_NORM_TASK,
        candidate=LAYER_NORM,
        features=("norm", "weights", "warp", "double_parameter", "default_argument"),
    ),
    CorpusCase(
        name="rms_norm_float4",
        task=RMS_NORM_TASK,
        candidate=RMS_NORM,
        features=("norm", "weights", "vectorised", "template", "launch_bounds", "stream", "float_parameter", "fast_math"),
    ),
    CorpusCase(
        name="group_norm_welford",
        task=GROUP_NORM_TASK,
        candidate=GROUP_NORM,
        features=("norm", "weights", "warp", "struct", "macros", "int_parameter", "checks"),
    ),
]
