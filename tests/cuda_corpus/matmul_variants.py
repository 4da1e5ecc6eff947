"""Products of matrices in other forms: strided, batched, with a vector."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

STRIDED = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

// The operands are read where they lie, whatever their strides are: no copies for transposed views.
struct View {
    const float* data;
    long s0, s1;
    __device__ float operator()(long i, long j) const { return data[i * s0 + j * s1]; }
};

__global__ void strided_matmul(View a, View b, float* c, int m, int n, int k) {
    __shared__ float ta[16][17], tb[16][17];
    const int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x;
    float sum = 0.f;
    for (int t = 0; t < k; t += 16) {
        ta[threadIdx.y][threadIdx.x] = i < m && t + threadIdx.x < k ? a(i, t + threadIdx.x) : 0.f;
        tb[threadIdx.y][threadIdx.x] = j < n && t + threadIdx.y < k ? b(t + threadIdx.y, j) : 0.f;
        __syncthreads();
        for (int q = 0; q < 16; ++q) sum += ta[threadIdx.y][q] * tb[q][threadIdx.x];
        __syncthreads();
    }
    if (i < m && j < n) c[(long)i * n + j] = sum;
}

torch::Tensor matmul_strided(const torch::Tensor& a, const torch::Tensor& b) {
    const int m = a.size(0), k = a.size(1), n = b.size(1);
    TORCH_CHECK(b.size(0) == k, "shapes do not fit");
    torch::Tensor c = torch::empty({m, n}, a.options());
    const View va{a.data_ptr<float>(), a.stride(0), a.stride(1)};
    const View vb{b.data_ptr<float>(), b.stride(0), b.stride(1)};
    strided_matmul<<<dim3((n + 15) / 16, (m + 15) / 16), dim3(16, 16)>>>(va, vb, c.data_ptr<float>(), m, n, k);
    return c;
}
"""

cpp_source = "torch::Tensor matmul_strided(const torch::Tensor& a, const torch::Tensor& b);"

_mm = load_inline(name="matmul_any_strides", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["matmul_strided"])


class ModelNew(nn.Module):
    def forward(self, a, b):
        # views, not copies: the kernel takes strides
        return _mm.matmul_strided(a.t(), b.t())
'''

LARGE_SHARED = r"""
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = '''
#include <torch/extension.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

constexpr int ROWS = 32;

// A block keeps ROWS whole rows of A in shared memory, more than the 48 KB that need no opt-in.
__global__ void panel_matmul(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c,
                             int m, int n, int k) {
  extern __shared__ float panel[];
  const int first = blockIdx.x * ROWS;
  const int rows = min(ROWS, m - first);
  for (int i = threadIdx.x; i < rows * k; i += blockDim.x) panel[i] = a[(int64_t)first * k + i];
  __syncthreads();
  for (int o = threadIdx.x; o < rows * n; o += blockDim.x) {
    const int r = o / n, j = o % n;
    const float* row = panel + r * k;
    float acc = 0.f;
    for (int q = 0; q < k; ++q) acc += row[q] * __ldg(b + (int64_t)q * n + j);
    c[(int64_t)(first + r) * n + j] = acc;
  }
}

torch::Tensor panel_matmul_forward(torch::Tensor a, torch::Tensor b) {
  const int m = a.size(0), k = a.size(1), n = b.size(1);
  auto c = torch::empty({m, n}, a.options());
  const int smem = ROWS * k * sizeof(float);
  C10_CUDA_CHECK(cudaFuncSetAttribute(panel_matmul, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  int per_sm = 0;
  C10_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, panel_matmul, 256, smem));
  TORCH_CHECK(per_sm > 0, "a panel of ", ROWS, " rows of ", k, " floats does not fit into shared memory");
  panel_matmul<<<(m + ROWS - 1) / ROWS, 256, smem, c10::cuda::getCurrentCUDAStream()>>>(
      a.data_ptr<float>(), b.data_ptr<float>(), c.data_ptr<float>(), m, n, k);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return c;
}
'''

cpp_source = '''
torch::Tensor panel_matmul_forward(torch::Tensor a, torch::Tensor b);
'''

panel = load_inline(name='panel_matmul', cpp_sources=cpp_source, cuda_sources=cuda_source,
                    functions=['panel_matmul_forward'], verbose=False)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, a, b):
        return panel.panel_matmul_forward(a.contiguous(), b.contiguous())
"""

BATCHED = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

const int TS = 16;

__global__ void bmm_kernel(const float* A, const float* B, float* C, int M, int N, int K)
{
    __shared__ float Asub[TS][TS];
    __shared__ float Bsub[TS][TS];

    const size_t batch = blockIdx.z;
    A += batch * M * K;
    B += batch * K * N;
    C += batch * M * N;

    int row = blockIdx.y * TS + threadIdx.y;
    int col = blockIdx.x * TS + threadIdx.x;

    float sum = 0;
    for (int k0 = 0; k0 < K; k0 += TS) {
        Asub[threadIdx.y][threadIdx.x] = 0;
        Bsub[threadIdx.y][threadIdx.x] = 0;
        if (row < M && k0 + threadIdx.x < K) Asub[threadIdx.y][threadIdx.x] = A[row * K + k0 + threadIdx.x];
        if (col < N && k0 + threadIdx.y < K) Bsub[threadIdx.y][threadIdx.x] = B[(k0 + threadIdx.y) * N + col];
        __syncthreads();
        for (int k = 0; k < TS; k++)
            sum += Asub[threadIdx.y][k] * Bsub[k][threadIdx.x];
        __syncthreads();
    }

    if (row < M && col < N)
        C[row * N + col] = sum;
}

torch::Tensor bmm(torch::Tensor A, torch::Tensor B)
{
    AT_ASSERTM(A.dim() == 3 && B.dim() == 3, "bmm expects 3D tensors");
    auto batch = A.size(0), M = A.size(1), K = A.size(2), N = B.size(2);
    auto C = torch::zeros({batch, M, N}, torch::device(A.device()).dtype(A.scalar_type()));
    dim3 block(TS, TS, 1);
    dim3 grid((N + TS - 1) / TS, (M + TS - 1) / TS, batch);
    bmm_kernel<<<grid, block>>>(A.data_ptr<float>(), B.data_ptr<float>(), C.data_ptr<float>(), M, N, K);
    cudaError_t status = cudaDeviceSynchronize();
    TORCH_CHECK(status == cudaSuccess, "bmm failed: ", cudaGetErrorString(status));
    return C;
}
"""

cpp_source = """
torch::Tensor bmm(torch::Tensor A, torch::Tensor B);
"""

bmm_module = load_inline(
    name="bmm_tiled",
    cpp_sources=[cpp_source],
    cuda_sources=[cuda_source],
    functions=["bmm"],
    extra_cuda_cflags=["-O2"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super(ModelNew, self).__init__()

    def forward(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        if not A.is_contiguous():
            A = A.contiguous()
        if not B.is_contiguous():
            B = B.contiguous()
        return bmm_module.bmm(A, B)
'''

MATVEC = plain_module(
    name="matvec_warps",
    functions="matvec",
    cuda_source="""
#include <torch/extension.h>

// Eight rows a block, a warp for each; every lane walks along its row in steps of 32.
__global__ void matvec_kernel(const float* __restrict__ A, const float* __restrict__ x, float* __restrict__ y, int M, int K) {
    int row = blockIdx.x * 8 + threadIdx.y;
    if (row >= M) return;
    float s0 = 0.f, s1 = 0.f;
    int k = threadIdx.x;
    for (; k + 32 < K; k += 64) {
        s0 = fmaf(A[(size_t)row * K + k], x[k], s0);
        s1 = fmaf(A[(size_t)row * K + k + 32], x[k + 32], s1);
    }
    if (k < K) s0 = fmaf(A[(size_t)row * K + k], x[k], s0);
    float s = s0 + s1;
    for (int d = 16; d > 0; d >>= 1) s += __shfl_down_sync(0xffffffff, s, d);
    if (threadIdx.x == 0) y[row] = s;
}

torch::Tensor matvec(torch::Tensor A, torch::Tensor x) {
    TORCH_CHECK(x.numel() == A.size(1), "vector of ", x.numel(), " elements for a matrix with ", A.size(1), " columns");
    const int M = A.size(0), K = A.size(1);
    auto y = torch::empty({M}, A.options());
    matvec_kernel<<<(M + 7) / 8, dim3(32, 8)>>>(A.data_ptr<float>(), x.data_ptr<float>(), y.data_ptr<float>(), M, K);
    return y.view({M, 1});
}
""",
    cpp_source="torch::Tensor matvec(torch::Tensor A, torch::Tensor x);",
    args="A, x",
    forward="ext.matvec(A, x.contiguous())",
)

TWO = "torch.randn({}), torch.randn({})"

CASES = [
    CorpusCase(
        name="matmul_of_transposed_views",
        task=stateless_task("torch.matmul(a.T, b.T)", TWO.format("350, 400", "310, 350"), "a, b"),
        candidate=STRIDED,
        features=("matmul", "stride", "struct", "const_reference", "checks"),
    ),
    CorpusCase(
        name="matmul_panel_in_large_shared_memory",
        task=stateless_task("torch.matmul(a, b)", TWO.format("700, 499", "499, 96"), "a, b"),
        candidate=LARGE_SHARED,
        features=("matmul", "func_attribute", "dynamic_shared", "occupancy", "cuda_check", "stream", "launch_check", "constexpr"),
    ),
    CorpusCase(
        name="batched_matmul",
        task=stateless_task("torch.bmm(A, B)", TWO.format("24, 100, 130", "24, 130, 90"), "A, B"),
        candidate=BATCHED,
        features=("matmul", "shared", "assertm", "device_synchronize", "tensor_options"),
    ),
    CorpusCase(
        name="matrix_vector",
        task=stateless_task("torch.matmul(A, x)", "torch.randn(1501, 1030) / 32, torch.randn(1030, 1)", "A, x"),
        candidate=MATVEC,
        features=("matmul", "warp", "view", "checks"),
    ),
]
