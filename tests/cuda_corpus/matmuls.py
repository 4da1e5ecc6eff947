"""Products of two matrices in single precision."""

from tests.cuda_corpus.case import CorpusCase, stateless_task

NAIVE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

# C = A @ B, one thread for each element of C
cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void matmul_kernel(const float* A, const float* B, float* C, int M, int N, int K) {
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    int col = blockIdx.x * blockDim.x + threadIdx.x;

    if (row < M && col < N) {
        float value = 0.0f;
        for (int k = 0; k < K; ++k) {
            value += A[row * K + k] * B[k * N + col];
        }
        C[row * N + col] = value;
    }
}

torch::Tensor matmul_cuda(torch::Tensor A, torch::Tensor B) {
    int M = A.size(0);
    int K = A.size(1);
    int N = B.size(1);

    auto C = torch::zeros({M, N}, A.options());

    dim3 threads(16, 16);
    dim3 blocks((N + threads.x - 1) / threads.x, (M + threads.y - 1) / threads.y);

    matmul_kernel<<<blocks, threads>>>(
        A.data_ptr<float>(), B.data_ptr<float>(), C.data_ptr<float>(), M, N, K);

    return C;
}
"""

cpp_source = (
    "torch::Tensor matmul_cuda(torch::Tensor A, torch::Tensor B);"
)

matmul = load_inline(
    name="matmul_naive",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["matmul_cuda"],
    verbose=True,
    extra_cflags=[""],
    extra_ldflags=[""],
)


class ModelNew(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matmul = matmul

    def forward(self, A, B):
        return self.matmul.matmul_cuda(A, B)
'''

TILED = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda.h>
#include <cuda_runtime.h>

#define TILE_WIDTH 32

#define CHECK_CUDA(x) TORCH_CHECK(x.is_cuda(), #x " must be a CUDA tensor")
#define CHECK_CONTIGUOUS(x) TORCH_CHECK(x.is_contiguous(), #x " must be contiguous")
#define CHECK_INPUT(x) \
    CHECK_CUDA(x);     \
    CHECK_CONTIGUOUS(x)

__global__ void tiled_matmul_kernel(
    const float* __restrict__ A,
    const float* __restrict__ B,
    float* __restrict__ C,
    const int M, const int N, const int K)
{
    __shared__ float As[TILE_WIDTH][TILE_WIDTH];
    __shared__ float Bs[TILE_WIDTH][TILE_WIDTH + 1];  // padded against bank conflicts

    const int tx = threadIdx.x, ty = threadIdx.y;
    const int row = blockIdx.y * TILE_WIDTH + ty;
    const int col = blockIdx.x * TILE_WIDTH + tx;
    float acc = 0.0f;

    for (int t = 0; t < (K + TILE_WIDTH - 1) / TILE_WIDTH; ++t) {
        const int a_col = t * TILE_WIDTH + tx;
        const int b_row = t * TILE_WIDTH + ty;
        As[ty][tx] = (row < M && a_col < K) ? A[row * K + a_col] : 0.0f;
        Bs[ty][tx] = (b_row < K && col < N) ? B[b_row * N + col] : 0.0f;
        __syncthreads();

        #pragma unroll
        for (int k = 0; k < TILE_WIDTH; ++k) {
            acc += As[ty][k] * Bs[k][tx];
        }
        __syncthreads();
    }

    if (row < M && col < N) {
        C[row * N + col] = acc;
    }
}

torch::Tensor tiled_matmul(torch::Tensor A, torch::Tensor B)
{
    CHECK_INPUT(A);
    CHECK_INPUT(B);
    TORCH_CHECK(A.size(1) == B.size(0), "inner dimensions must match, got ", A.size(1), " and ", B.size(0));

    const int M = A.size(0), K = A.size(1), N = B.size(1);
    auto C = torch::empty({M, N}, A.options());

    const dim3 block(TILE_WIDTH, TILE_WIDTH);
    const dim3 grid((N + TILE_WIDTH - 1) / TILE_WIDTH, (M + TILE_WIDTH - 1) / TILE_WIDTH);
    tiled_matmul_kernel<<<grid, block>>>(A.data_ptr<float>(), B.data_ptr<float>(), C.data_ptr<float>(), M, N, K);
    return C;
}
"""

cpp_source = "torch::Tensor tiled_matmul(torch::Tensor A, torch::Tensor B);"

matmul = load_inline(
    name="tiled_matmul",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["tiled_matmul"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super(ModelNew, self).__init__()

    def forward(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return matmul.tiled_matmul(A.contiguous(), B.contiguous())
'''

REGISTER_BLOCKED = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <c10/cuda/CUDAException.h>

template <int BM, int BN, int BK, int TM, int TN>
__global__ void __launch_bounds__((BM / TM) * (BN / TN))
sgemm(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, int m, int n, int k) {
  constexpr int threads = (BM / TM) * (BN / TN);
  __shared__ float sa[BK][BM + 4];
  __shared__ float sb[BK][BN];
  const int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
  const int tr = threadIdx.x / (BN / TN) * TM, tc = threadIdx.x % (BN / TN) * TN;

  float acc[TM][TN] = {};
  for (int k0 = 0; k0 < k; k0 += BK) {
    for (int i = threadIdx.x; i < BM * BK; i += threads) {
      const int r = i / BK, q = i % BK;
      sa[q][r] = row0 + r < m && k0 + q < k ? a[(size_t)(row0 + r) * k + k0 + q] : 0.f;
    }
    for (int i = threadIdx.x; i < BK * BN; i += threads) {
      const int q = i / BN, r = i % BN;
      sb[q][r] = k0 + q < k && col0 + r < n ? b[(size_t)(k0 + q) * n + col0 + r] : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int q = 0; q < BK; ++q) {
      float ra[TM], rb[TN];
#pragma unroll
      for (int i = 0; i < TM; ++i) ra[i] = sa[q][tr + i];
#pragma unroll
      for (int j = 0; j < TN; ++j) rb[j] = sb[q][tc + j];
#pragma unroll
      for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) acc[i][j] = fmaf(ra[i], rb[j], acc[i][j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < TM; ++i)
#pragma unroll
    for (int j = 0; j < TN; ++j)
      if (row0 + tr + i < m && col0 + tc + j < n) c[(size_t)(row0 + tr + i) * n + col0 + tc + j] = acc[i][j];
}

torch::Tensor gemm(torch::Tensor a, torch::Tensor b) {
  TORCH_CHECK(a.dim() == 2 && b.dim() == 2, "gemm takes matrices");
  TORCH_CHECK(a.size(1) == b.size(0), "cannot multiply ", a.sizes(), " by ", b.sizes());
  a = a.contiguous();
  b = b.contiguous();
  const int m = a.size(0), k = a.size(1), n = b.size(1);
  auto c = torch::empty({m, n}, a.options());
  constexpr int BM = 64, BN = 64, BK = 16;
  const dim3 grid((n + BN - 1) / BN, (m + BM - 1) / BM);
  sgemm<BM, BN, BK, 4, 4><<<grid, 256>>>(a.data_ptr<float>(), b.data_ptr<float>(), c.data_ptr<float>(), m, n, k);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return c;
}
"""

cpp_source = "torch::Tensor gemm(torch::Tensor a, torch::Tensor b);"

_gemm = load_inline(
    name="register_blocked_gemm",
    cpp_sources=[cpp_source],
    cuda_sources=[cuda_source],
    functions=["gemm"],
    extra_cuda_cflags=["-O3", "--ptxas-options=-v"],
)


class ModelNew(nn.Module):
    def forward(self, a, b):
        return _gemm.gemm(a, b)
'''

TWO = "torch.randn({}), torch.randn({})"

CASES = [
    CorpusCase(
        name="matmul_naive",
        task=stateless_task("torch.matmul(A, B)", TWO.format("300, 500", "500, 260"), "A, B"),
        candidate=NAIVE,
        features=("matmul",),
    ),
    CorpusCase(
        name="matmul_tiled",
        task=stateless_task("torch.matmul(A, B)", TWO.format("515, 401", "401, 333"), "A, B"),
        candidate=TILED,
        features=("matmul", "shared", "macros", "checks"),
    ),
    CorpusCase(
        name="matmul_register_blocked",
        task=stateless_task("a @ b", TWO.format("530, 300", "300, 710"), "a, b"),
        candidate=REGISTER_BLOCKED,
        features=("matmul", "template", "launch_bounds", "launch_check", "checks", "ptxas_options"),
    ),
]
