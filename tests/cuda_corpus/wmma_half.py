"""Contracts in half precision and bfloat16: tensor cores, paired values, dispatch over types."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

WMMA_HALF = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <mma.h>

using namespace nvcuda;

#define WMMA_M 16
#define WMMA_N 16
#define WMMA_K 16
#define WARPS 4

// One warp computes a 16 x 16 tile of C = A * B with tensor cores, accumulating in float.
__global__ void wmma_gemm_kernel(const half* A, const half* B, half* C, int M, int N, int K) {
    __shared__ __align__(32) float staging[WARPS][WMMA_M * WMMA_N];

    const int tileM = blockIdx.y;
    const int tileN = blockIdx.x * WARPS + threadIdx.y;
    if (tileN * WMMA_N >= N) return;

    wmma::fragment<wmma::matrix_a, WMMA_M, WMMA_N, WMMA_K, half, wmma::row_major> a_frag;
    wmma::fragment<wmma::matrix_b, WMMA_M, WMMA_N, WMMA_K, half, wmma::row_major> b_frag;
    wmma::fragment<wmma::accumulator, WMMA_M, WMMA_N, WMMA_K, float> c_frag;
    wmma::fill_fragment(c_frag, 0.0f);

    for (int k = 0; k < K; k += WMMA_K) {
        wmma::load_matrix_sync(a_frag, A + tileM * WMMA_M * K + k, K);
        wmma::load_matrix_sync(b_frag, B + k * N + tileN * WMMA_N, N);
        wmma::mma_sync(c_frag, a_frag, b_frag, c_frag);
    }

    float* tile = staging[threadIdx.y];
    wmma::store_matrix_sync(tile, c_frag, WMMA_N, wmma::mem_row_major);
    __syncwarp();
    for (int i = threadIdx.x; i < WMMA_M * WMMA_N; i += 32) {
        int r = tileM * WMMA_M + i / WMMA_N;
        int c = tileN * WMMA_N + i % WMMA_N;
        C[r * N + c] = __float2half(tile[i]);
    }
}

torch::Tensor wmma_gemm(torch::Tensor A, torch::Tensor B) {
    TORCH_CHECK(A.dtype() == torch::kFloat16 && B.dtype() == torch::kFloat16, "A and B must be half");
    const int M = A.size(0), K = A.size(1), N = B.size(1);
    TORCH_CHECK(M % WMMA_M == 0 && N % WMMA_N == 0 && K % WMMA_K == 0,
                "sizes must be multiples of 16, got M=", M, ", N=", N, ", K=", K);
    auto C = torch::empty({M, N}, A.options());
    dim3 block(32, WARPS);
    dim3 grid((N / WMMA_N + WARPS - 1) / WARPS, M / WMMA_M);
    wmma_gemm_kernel<<<grid, block>>>(
        reinterpret_cast<const half*>(A.data_ptr<at::Half>()),
        reinterpret_cast<const half*>(B.data_ptr<at::Half>()),
        reinterpret_cast<half*>(C.data_ptr<at::Half>()),
        M, N, K);
    return C;
}
"""

cpp_source = "torch::Tensor wmma_gemm(torch::Tensor A, torch::Tensor B);"

wmma_ext = load_inline(
    name="wmma_gemm_ext",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["wmma_gemm"],
    verbose=False,
    extra_cuda_cflags=["-O3"],
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, A, B):
        return wmma_ext.wmma_gemm(A.contiguous(), B.contiguous())
'''

LINEAR_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.fc = nn.Linear(in_features, out_features)

    def forward(self, x):
        return torch.relu(self.fc(x))


def get_inputs():
    return [torch.randn(400, 320)]


def get_init_inputs():
    return [320, 272]
"""

WMMA_BF16 = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = "torch::Tensor linear_relu_bf16(torch::Tensor x, torch::Tensor weight, torch::Tensor bias);"

cuda_source = """
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_bf16.h>
#include <mma.h>

namespace wmma = nvcuda::wmma;
using bf16 = __nv_bfloat16;

// x [m, k] row-major, weight [n, k] row-major and so the transposed operand column-major
__global__ void linear_relu(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, int m, int n, int k) {
  extern __shared__ __align__(32) float out_tiles[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int tile = blockIdx.x * warps + warp;
  const int tiles_n = n / 16;
  if (tile >= (m / 16) * tiles_n) return;
  const int i0 = tile / tiles_n * 16, j0 = tile % tiles_n * 16;

  wmma::fragment<wmma::matrix_a, 16, 16, 16, bf16, wmma::row_major> fx;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, bf16, wmma::col_major> fw;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> acc;
  wmma::fill_fragment(acc, 0.f);
  for (int q = 0; q < k; q += 16) {
    wmma::load_matrix_sync(fx, x + i0 * k + q, k);
    wmma::load_matrix_sync(fw, weight + j0 * k + q, k);
    wmma::mma_sync(acc, fx, fw, acc);
  }
  float* mine = out_tiles + warp * 256;
  wmma::store_matrix_sync(mine, acc, 16, wmma::mem_row_major);
  __syncwarp();
  for (int e = lane; e < 256; e += 32) {
    const float v = mine[e] + __bfloat162float(bias[j0 + e % 16]);
    y[(i0 + e / 16) * n + j0 + e % 16] = __float2bfloat16(v > 0.f ? v : 0.f);
  }
}

torch::Tensor linear_relu_bf16(torch::Tensor x, torch::Tensor weight, torch::Tensor bias) {
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "bfloat16 expected, not ", x.scalar_type());
  x = x.contiguous();
  const int m = x.size(0), k = x.size(1), n = weight.size(0);
  TORCH_CHECK(m % 16 == 0 && n % 16 == 0 && k % 16 == 0, "sizes must be multiples of 16");
  auto y = at::empty({m, n}, x.options());
  const int warps = 8, tiles = (m / 16) * (n / 16);
  linear_relu<<<(tiles + warps - 1) / warps, warps * 32, warps * 256 * sizeof(float), c10::cuda::getCurrentCUDAStream()>>>(
      reinterpret_cast<const bf16*>(x.data_ptr<at::BFloat16>()), reinterpret_cast<const bf16*>(weight.data_ptr<at::BFloat16>()),
      reinterpret_cast<const bf16*>(bias.data_ptr<at::BFloat16>()), reinterpret_cast<bf16*>(y.data_ptr<at::BFloat16>()), m, n, k);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
"""

ext = load_inline("linear_relu_bf16", cpp_source, cuda_source, functions=["linear_relu_bf16"])


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.fc = nn.Linear(in_features, out_features)

    def forward(self, x):
        return ext.linear_relu_bf16(x, self.fc.weight, self.fc.bias)
'''

HALF2_AXPY = plain_module(
    name="half2_axpy",
    functions="axpy_half",
    cuda_source="""
#include <torch/extension.h>
#include <cuda_fp16.h>

__global__ void axpy_half2_kernel(const __half2* x, const __half2* y, __half2* out, __half2 alpha, int n2) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n2) {
        out[i] = __hfma2(alpha, x[i], y[i]);
    }
}

__global__ void axpy_half_tail(const __half* x, const __half* y, __half* out, float alpha, int n) {
    // the last element of an odd number
    out[n - 1] = __float2half(alpha * __half2float(x[n - 1]) + __half2float(y[n - 1]));
}

torch::Tensor axpy_half(torch::Tensor x, torch::Tensor y, double alpha) {
    TORCH_CHECK(x.scalar_type() == torch::kHalf, "x must be float16");
    TORCH_CHECK(x.is_contiguous() && y.is_contiguous());
    auto out = torch::empty_like(x);
    const int n = x.numel();
    const __half* xp = reinterpret_cast<const __half*>(x.data_ptr<at::Half>());
    const __half* yp = reinterpret_cast<const __half*>(y.data_ptr<at::Half>());
    __half* op = reinterpret_cast<__half*>(out.data_ptr<at::Half>());
    const int n2 = n / 2;
    axpy_half2_kernel<<<(n2 + 255) / 256, 256>>>(
        reinterpret_cast<const __half2*>(xp), reinterpret_cast<const __half2*>(yp), reinterpret_cast<__half2*>(op),
        __float2half2_rn(static_cast<float>(alpha)), n2);
    if (n % 2) axpy_half_tail<<<1, 1>>>(xp, yp, op, static_cast<float>(alpha), n);
    return out;
}
""",
    cpp_source="torch::Tensor axpy_half(torch::Tensor x, torch::Tensor y, double alpha);",
    args="x, y",
    forward="ext.axpy_half(x, y, 0.75)",
)

GELU_AND_HALF = r"""
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = '''
#include <torch/extension.h>
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <cuda_fp16.h>

template <typename scalar_t>
__global__ void new_gelu_kernel(const scalar_t* __restrict__ x, scalar_t* __restrict__ y, const int64_t numel) {
    const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    if (i < numel) {
        const float v = static_cast<float>(x[i]);
        const float inner = 0.7978845608028654f * (v + 0.044715f * v * v * v);
        y[i] = static_cast<scalar_t>(0.5f * v * (1.0f + tanhf(inner)));
    }
}

torch::Tensor new_gelu(const torch::Tensor& x) {
    auto x_ = x.contiguous();
    auto y = torch::empty_like(x_);
    const int64_t numel = x_.numel();
    const int threads = 256;
    const int blocks = (numel + threads - 1) / threads;
    auto stream = at::cuda::getCurrentCUDAStream();

    AT_DISPATCH_FLOATING_TYPES_AND_HALF(x_.scalar_type(), "new_gelu", [&] {
        new_gelu_kernel<scalar_t><<<blocks, threads, 0, stream>>>(
            x_.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), numel);
    });
    return y;
}
'''

cpp_source = '''
torch::Tensor new_gelu(const torch::Tensor& x);
'''

gelu_ext = load_inline(
    name='new_gelu_half',
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=['new_gelu'],
    verbose=True,
)


class ModelNew(nn.Module):
    # tanh approximation of GELU
    def __init__(self):
        super(ModelNew, self).__init__()

    def forward(self, x):
        return gelu_ext.new_gelu(x)
"""

SOFTMAX_AND2 = plain_module(
    name="softmax_bf16",
    functions="softmax_lastdim",
    cuda_source="""
#include <torch/extension.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

template <typename T>
__global__ void softmax_rows(const T* __restrict__ x, T* __restrict__ y, int rows, int cols) {
  // a warp a row; all arithmetic in float whatever T is
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  const T* src = x + static_cast<int64_t>(row) * cols;
  T* dst = y + static_cast<int64_t>(row) * cols;
  float top = -INFINITY;
  for (int c = threadIdx.x; c < cols; c += warpSize) top = fmaxf(top, static_cast<float>(src[c]));
  for (int d = warpSize / 2; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, d));
  float sum = 0.f;
  for (int c = threadIdx.x; c < cols; c += warpSize) sum += expf(static_cast<float>(src[c]) - top);
  for (int d = warpSize / 2; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffff, sum, d);
  for (int c = threadIdx.x; c < cols; c += warpSize)
    dst[c] = static_cast<T>(expf(static_cast<float>(src[c]) - top) / sum);
}

at::Tensor softmax_lastdim(const at::Tensor& input) {
  c10::cuda::CUDAGuard guard(input.device());
  const auto x = input.contiguous();
  auto y = at::empty_like(x);
  const int cols = x.size(-1), rows = x.numel() / cols;
  const dim3 block(32, 8);
  const auto stream = c10::cuda::getCurrentCUDAStream(x.device().index());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::ScalarType::Half, at::ScalarType::BFloat16, x.scalar_type(), "softmax_lastdim", [&] {
        softmax_rows<scalar_t><<<(rows + 7) / 8, block, 0, stream>>>(
            x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), rows, cols);
      });
  return y;
}
""",
    cpp_source="at::Tensor softmax_lastdim(const at::Tensor& input);",
    forward="ext.softmax_lastdim(x)",
    options='extra_cuda_cflags=["-O3"]',
)

CASES = [
    CorpusCase(
        name="wmma_half_matmul",
        task=stateless_task("torch.matmul(A, B)", "torch.randn(272, 400), torch.randn(400, 304)", "A, B"),
        candidate=WMMA_HALF,
        dtype="float16",
        features=("wmma", "half", "matmul", "shared", "macros", "reinterpret_cast", "checks"),
    ),
    CorpusCase(
        name="wmma_bfloat16_linear_relu",
        task=LINEAR_TASK,
        candidate=WMMA_BF16,
        dtype="bfloat16",
        features=("wmma", "bfloat16", "weights", "dynamic_shared", "stream", "launch_check", "reinterpret_cast", "checks"),
    ),
    CorpusCase(
        name="half2_axpy",
        task=stateless_task("0.75 * x + y", "torch.randn(999, 1001), torch.randn(999, 1001)", "x, y"),
        candidate=HALF2_AXPY,
        dtype="float16",
        features=("half", "half2", "elementwise", "vectorised", "reinterpret_cast", "double_parameter", "checks"),
    ),
    CorpusCase(
        name="gelu_tanh_and_half",
        task=stateless_task('F.gelu(x, approximate="tanh")', "torch.randn(800, 1025)"),
        candidate=GELU_AND_HALF,
        dtype="float16",
        features=("half", "dispatch_half", "elementwise", "cuda_context", "stream", "const_reference"),
    ),
    CorpusCase(
        name="softmax_half_or_bfloat16",
        task=stateless_task("torch.softmax(x, dim=-1)", "torch.randn(3, 501, 700)"),
        candidate=SOFTMAX_AND2,
        dtype="bfloat16",
        features=("bfloat16", "dispatch_and2", "softmax", "warp", "guard", "stream", "at_tensor"),
    ),
]
