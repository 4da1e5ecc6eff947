"""Attention and rotary embeddings."""

from tests.cuda_corpus.case import CorpusCase, stateless_task

NAIVE = r'''
import math

import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

// One block per (batch * head, query): scores in shared memory, softmax, weighted sum of the values.
__global__ void attention_kernel(
    const float* __restrict__ Q, const float* __restrict__ K, const float* __restrict__ V,
    float* __restrict__ O, int Lq, int Lk, int D, float scale) {
    extern __shared__ float scores[];
    __shared__ float red[128];
    const int q = blockIdx.x;
    const int bh = blockIdx.y;
    const int tid = threadIdx.x;
    const float* q_ptr = Q + ((long)bh * Lq + q) * D;
    const float* k_ptr = K + (long)bh * Lk * D;
    const float* v_ptr = V + (long)bh * Lk * D;

    float m = -1e30f;
    for (int j = tid; j < Lk; j += blockDim.x) {
        float s = 0.0f;
        for (int d = 0; d < D; d++) s += q_ptr[d] * k_ptr[j * D + d];
        s *= scale;
        scores[j] = s;
        m = fmaxf(m, s);
    }
    red[tid] = m;
    __syncthreads();
    for (int s = blockDim.x / 2; s > 0; s >>= 1) {
        if (tid < s) red[tid] = fmaxf(red[tid], red[tid + s]);
        __syncthreads();
    }
    m = red[0];
    __syncthreads();

    float sum = 0.0f;
    for (int j = tid; j < Lk; j += blockDim.x) {
        float e = expf(scores[j] - m);
        scores[j] = e;
        sum += e;
    }
    red[tid] = sum;
    __syncthreads();
    for (int s = blockDim.x / 2; s > 0; s >>= 1) {
        if (tid < s) red[tid] += red[tid + s];
        __syncthreads();
    }
    const float inv = 1.0f / red[0];

    for (int d = tid; d < D; d += blockDim.x) {
        float acc = 0.0f;
        for (int j = 0; j < Lk; j++) acc += scores[j] * v_ptr[j * D + d];
        O[((long)bh * Lq + q) * D + d] = acc * inv;
    }
}

torch::Tensor attention_forward(torch::Tensor Q, torch::Tensor K, torch::Tensor V, float scale) {
    TORCH_CHECK(Q.dim() == 4 && K.dim() == 4 && V.dim() == 4, "expected [B, H, L, D] tensors");
    const int B = Q.size(0), H = Q.size(1), Lq = Q.size(2), D = Q.size(3), Lk = K.size(2);
    auto O = torch::empty_like(Q);
    dim3 grid(Lq, B * H);
    attention_kernel<<<grid, 128, Lk * sizeof(float)>>>(
        Q.data_ptr<float>(), K.data_ptr<float>(), V.data_ptr<float>(), O.data_ptr<float>(), Lq, Lk, D, scale);
    return O;
}
"""

cpp_source = "torch::Tensor attention_forward(torch::Tensor Q, torch::Tensor K, torch::Tensor V, float scale);"

attention = load_inline(
    name="naive_attention",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["attention_forward"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super(ModelNew, self).__init__()

    def forward(self, Q, K, V):
        return attention.attention_forward(Q.contiguous(), K.contiguous(), V.contiguous(), 1.0 / math.sqrt(Q.size(-1)))
'''

FLASH_CAUSAL = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/CUDAException.h>
#include <math_constants.h>

constexpr int BLOCK_Q = 64;   // queries of a block, one a thread
constexpr int BLOCK_K = 32;   // keys and values staged at a time

template <int HEAD_DIM>
__global__ void __launch_bounds__(BLOCK_Q)
causal_attention_kernel(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
                        float* __restrict__ out, const int length, const float scale) {
  __shared__ float ks[BLOCK_K][HEAD_DIM];
  __shared__ float vs[BLOCK_K][HEAD_DIM];

  const int64_t head = static_cast<int64_t>(blockIdx.y) * length * HEAD_DIM;
  const int row = blockIdx.x * BLOCK_Q + threadIdx.x;
  const bool active = row < length;

  float qr[HEAD_DIM], acc[HEAD_DIM];
#pragma unroll
  for (int d = 0; d < HEAD_DIM; ++d) {
    qr[d] = active ? q[head + static_cast<int64_t>(row) * HEAD_DIM + d] * scale : 0.f;
    acc[d] = 0.f;
  }
  float running_max = -CUDART_INF_F, running_sum = 0.f;

  const int last_row = min(length, (static_cast<int>(blockIdx.x) + 1) * BLOCK_Q);
  for (int k0 = 0; k0 < last_row; k0 += BLOCK_K) {
    __syncthreads();
    for (int i = threadIdx.x; i < BLOCK_K * HEAD_DIM; i += BLOCK_Q) {
      const int j = i / HEAD_DIM, d = i % HEAD_DIM;
      const bool there = k0 + j < length;
      ks[j][d] = there ? k[head + static_cast<int64_t>(k0 + j) * HEAD_DIM + d] : 0.f;
      vs[j][d] = there ? v[head + static_cast<int64_t>(k0 + j) * HEAD_DIM + d] : 0.f;
    }
    __syncthreads();
    for (int j = 0; j < BLOCK_K && k0 + j <= row && k0 + j < length; ++j) {
      float s = 0.f;
#pragma unroll
      for (int d = 0; d < HEAD_DIM; ++d) s = fmaf(qr[d], ks[j][d], s);
      const float new_max = fmaxf(running_max, s);
      const float correction = __expf(running_max - new_max);
      const float p = __expf(s - new_max);
      running_sum = running_sum * correction + p;
#pragma unroll
      for (int d = 0; d < HEAD_DIM; ++d) acc[d] = fmaf(p, vs[j][d], acc[d] * correction);
      running_max = new_max;
    }
  }
  if (active) {
    const float inv = 1.f / running_sum;
#pragma unroll
    for (int d = 0; d < HEAD_DIM; ++d) out[head + static_cast<int64_t>(row) * HEAD_DIM + d] = acc[d] * inv;
  }
}

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  TORCH_CHECK(q.sizes() == k.sizes() && k.sizes() == v.sizes(), "q, k and v must have one shape");
  TORCH_CHECK(q.is_contiguous() && k.is_contiguous() && v.is_contiguous(), "q, k and v must be contiguous");
  const c10::cuda::OptionalCUDAGuard device_guard(at::device_of(q));
  const int64_t heads = q.size(0) * q.size(1);
  const int length = q.size(2), dim = q.size(3);
  auto out = at::empty_like(q);
  const dim3 grid((length + BLOCK_Q - 1) / BLOCK_Q, heads);
  const float scale = 1.f / std::sqrt(static_cast<float>(dim));
  auto stream = c10::cuda::getCurrentCUDAStream();
#define LAUNCH(DIM)                                                  \
  causal_attention_kernel<DIM><<<grid, BLOCK_Q, 0, stream>>>(        \
      q.data_ptr<float>(), k.data_ptr<float>(), v.data_ptr<float>(), \
      out.data_ptr<float>(), length, scale)
  if (dim == 32) {
    LAUNCH(32);
  } else if (dim == 64) {
    LAUNCH(64);
  } else {
    TORCH_CHECK(false, "head dimension ", dim, " is not supported, use 32 or 64");
  }
#undef LAUNCH
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}
"""

cpp_source = "at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);"

flash = load_inline(
    name="causal_attention_online",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["causal_attention"],
    extra_cuda_cflags=["-O3", "--use_fast_math"],
)


class ModelNew(nn.Module):
    """Causal attention that never stores the matrix of scores."""

    def forward(self, q, k, v):
        return flash.causal_attention(q.contiguous(), k.contiguous(), v.contiguous())
'''

CAUSAL = """
def causal(q, k, v):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    later = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1) @ v

"""

ROPE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = """
torch::Tensor apply_rope(torch::Tensor x, torch::Tensor cos_t, torch::Tensor sin_t);
"""

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

// x [B, H, L, D]; the first half of the last dimension is rotated with the second one.
__global__ void rope_kernel(const float* __restrict__ x, const float* __restrict__ cos_t,
                            const float* __restrict__ sin_t, float* __restrict__ y, int L, int D, long pairs)
{
    long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    int half = D / 2;
    int d = i % half;
    long vec = i / half;       // which vector of length D
    int pos = vec % L;
    float c = cos_t[pos * half + d], s = sin_t[pos * half + d];
    float a = x[vec * D + d], b = x[vec * D + d + half];
    y[vec * D + d] = a * c - b * s;
    y[vec * D + d + half] = b * c + a * s;
}

torch::Tensor apply_rope(torch::Tensor x, torch::Tensor cos_t, torch::Tensor sin_t)
{
    const int64_t L = x.size(-2), D = x.size(-1);
    TORCH_CHECK(D % 2 == 0, "the head dimension must be even, it is ", D);
    TORCH_CHECK(cos_t.size(0) >= L && cos_t.size(1) == D / 2, "table of cosines has the wrong shape: ", cos_t.sizes());
    x = x.contiguous();
    cos_t = cos_t.contiguous();
    sin_t = sin_t.contiguous();
    torch::Tensor y = torch::empty_like(x, x.options());
    const long pairs = x.numel() / 2;
    rope_kernel<<<(pairs + 255) / 256, 256>>>(x.data_ptr<float>(), cos_t.data_ptr<float>(), sin_t.data_ptr<float>(),
                                              y.data_ptr<float>(), L, D, pairs);
    return y;
}
"""

rope = load_inline(
    name="rotary_embedding",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["apply_rope"],
    extra_cflags=["-O3"],
    verbose=False,
)


class ModelNew(nn.Module):
    def forward(self, x, cos, sin):
        return rope.apply_rope(x, cos, sin)
'''

DECODE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

#define WARPS 4

// One new token against a cache of keys and values: a block a head, its warps share the cache's positions.
__global__ void decode_kernel(const float* q, const float* k, const float* v, float* o, int len, float scale) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const size_t head = blockIdx.x;
  q += head * 64;
  k += head * len * 64;
  v += head * len * 64;
  const float2 qv = make_float2(q[lane * 2] * scale, q[lane * 2 + 1] * scale);
  float m = -1e30f, sum = 0.f;
  float2 acc = make_float2(0.f, 0.f);
  for (int j = warp; j < len; j += WARPS) {
    const float2 kv = reinterpret_cast<const float2*>(k + (size_t)j * 64)[lane];
    float s = qv.x * kv.x + qv.y * kv.y;
    for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(0xffffffff, s, d);
    const float top = fmaxf(m, s), old = expf(m - top), p = expf(s - top);
    const float2 vv = reinterpret_cast<const float2*>(v + (size_t)j * 64)[lane];
    sum = sum * old + p;
    acc.x = acc.x * old + p * vv.x;
    acc.y = acc.y * old + p * vv.y;
    m = top;
  }
  __shared__ float ms[WARPS], sums[WARPS], accs[WARPS][64];
  if (lane == 0) {
    ms[warp] = m;
    sums[warp] = sum;
  }
  accs[warp][lane * 2] = acc.x;
  accs[warp][lane * 2 + 1] = acc.y;
  __syncthreads();
  if (threadIdx.x < 64) {
    float top = ms[0];
    for (int w = 1; w < WARPS; ++w) top = fmaxf(top, ms[w]);
    float total = 0.f, value = 0.f;
    for (int w = 0; w < WARPS; ++w) {
      const float f = expf(ms[w] - top);
      total += f * sums[w];
      value += f * accs[w][threadIdx.x];
    }
    o[head * 64 + threadIdx.x] = value / total;
  }
}

torch::Tensor decode_attention(torch::Tensor q, torch::Tensor k, torch::Tensor v) {
  TORCH_CHECK(q.size(-1) == 64, "built for a head dimension of 64, got ", q.size(-1));
  TORCH_CHECK(k.size(2) >= WARPS, "cache too short");
  auto out = torch::empty_like(q);
  const int heads = q.size(0) * q.size(1);
  decode_kernel<<<heads, WARPS * 32>>>(q.data_ptr<float>(), k.data_ptr<float>(), v.data_ptr<float>(), out.data_ptr<float>(),
                                       k.size(2), 0.125f);
  return out;
}
"""

cpp_source = """
torch::Tensor decode_attention(torch::Tensor q, torch::Tensor k, torch::Tensor v);
"""


def _build():
    return load_inline(
        name="decode_attention",
        cpp_sources=cpp_source,
        cuda_sources=cuda_source,
        functions=["decode_attention"],
        extra_cuda_cflags=["-O3"],
    )


_decode = _build()


class ModelNew(nn.Module):
    def forward(self, q, k, v):
        return _decode.decode_attention(q.contiguous(), k.contiguous(), v.contiguous())
'''

THREE = ", ".join(["torch.randn({})"] * 3)

CASES = [
    CorpusCase(
        name="attention_naive",
        task=stateless_task(
            "torch.softmax(Q @ K.transpose(-2, -1) / Q.shape[-1] ** 0.5, dim=-1) @ V",
            "torch.randn(4, 4, 150, 48), torch.randn(4, 4, 170, 48), torch.randn(4, 4, 170, 48)",
            "Q, K, V",
        ),
        candidate=NAIVE,
        features=("attention", "dynamic_shared", "shared", "float_parameter", "checks"),
    ),
    CorpusCase(
        name="attention_causal_online",
        task=stateless_task("causal(q, k, v)", THREE.format(*["2, 6, 210, 32"] * 3), "q, k, v", before=CAUSAL),
        candidate=FLASH_CAUSAL,
        features=("attention", "template", "launch_bounds", "guard", "stream", "launch_check", "macros", "at_tensor", "fast_math"),
    ),
    CorpusCase(
        name="rotary_embedding",
        task=stateless_task(
            "torch.cat((x[..., :32] * cos - x[..., 32:] * sin, x[..., 32:] * cos + x[..., :32] * sin), dim=-1)",
            "torch.randn(4, 6, 201, 64), torch.cos(torch.rand(201, 32)), torch.sin(torch.rand(201, 32))",
            "x, cos, sin",
        ),
        candidate=ROPE,
        features=("attention", "checks", "sizes"),
    ),
    CorpusCase(
        name="attention_decode_one_token",
        task=stateless_task(
            "torch.softmax(q @ k.transpose(-2, -1) * 0.125, dim=-1) @ v",
            "torch.randn(8, 8, 1, 64), torch.randn(8, 8, 250, 64), torch.randn(8, 8, 250, 64)",
            "q, k, v",
        ),
        candidate=DECODE,
        features=("attention", "warp", "shared", "vectorised", "macros", "checks"),
    ),
]
