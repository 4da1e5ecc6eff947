"""Softmax, its logarithm, and logsumexp."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

SOFTMAX_SHARED = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>
#include <cmath>

#define BLOCK_SIZE 256

__global__ void softmax_kernel(const float* __restrict__ x, float* __restrict__ y, int dim) {
    __shared__ float shared[BLOCK_SIZE];
    const int tid = threadIdx.x;
    const float* row_in = x + (long)blockIdx.x * dim;
    float* row_out = y + (long)blockIdx.x * dim;

    // 1. maximum of the row
    float local_max = -INFINITY;
    for (int i = tid; i < dim; i += BLOCK_SIZE)
        local_max = fmaxf(local_max, row_in[i]);
    shared[tid] = local_max;
    __syncthreads();
    for (int s = BLOCK_SIZE / 2; s > 0; s >>= 1) {
        if (tid < s) shared[tid] = fmaxf(shared[tid], shared[tid + s]);
        __syncthreads();
    }
    const float row_max = shared[0];
    __syncthreads();

    // 2. exponentials and their sum
    float local_sum = 0.0f;
    for (int i = tid; i < dim; i += BLOCK_SIZE) {
        float e = expf(row_in[i] - row_max);
        row_out[i] = e;
        local_sum += e;
    }
    shared[tid] = local_sum;
    __syncthreads();
    for (int s = BLOCK_SIZE / 2; s > 0; s >>= 1) {
        if (tid < s) shared[tid] += shared[tid + s];
        __syncthreads();
    }
    const float inv = 1.0f / shared[0];

    // 3. normalise
    for (int i = tid; i < dim; i += BLOCK_SIZE)
        row_out[i] *= inv;
}

torch::Tensor softmax_cuda(torch::Tensor x) {
    TORCH_CHECK(x.is_cuda(), "Input must be on CUDA");
    TORCH_CHECK(x.dim() == 2, "Input must be 2D");
    auto x_contig = x.contiguous();
    auto y = torch::empty_like(x_contig);
    const int batch = x_contig.size(0);
    const int dim = x_contig.size(1);
    softmax_kernel<<<batch, BLOCK_SIZE>>>(x_contig.data_ptr<float>(), y.data_ptr<float>(), dim);
    cudaError_t err = cudaGetLastError();
    if (err != cudaSuccess) {
        throw std::runtime_error(cudaGetErrorString(err));
    }
    return y;
}
"""

cpp_source = "torch::Tensor softmax_cuda(torch::Tensor x);"

softmax_ext = load_inline(
    name="softmax_ext",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["softmax_cuda"],
    verbose=False,
    extra_cuda_cflags=["-O3"],
)


class ModelNew(nn.Module):
    """
    Softmax along the last dimension, one block per row.
    """

    def __init__(self):
        super(ModelNew, self).__init__()
        self.softmax_ext = softmax_ext

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.softmax_ext.softmax_cuda(x)
'''

SOFTMAX_ONLINE = r"""
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = '''
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <math_constants.h>

struct MaxSum {
  float m;
  float s;
};

__device__ __forceinline__ MaxSum merge(MaxSum a, MaxSum b) {
  const MaxSum hi = a.m > b.m ? a : b;
  const MaxSum lo = a.m > b.m ? b : a;
  // exp(-inf - finite) is 0, so an empty partial result changes nothing
  return {hi.m, hi.s + (lo.s == 0.f ? 0.f : lo.s * __expf(lo.m - hi.m))};
}

__global__ void online_softmax(const float* __restrict__ in, float* __restrict__ out, int rows, int cols) {
  const int row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  in += static_cast<size_t>(row) * cols;
  out += static_cast<size_t>(row) * cols;
  MaxSum acc{-CUDART_INF_F, 0.f};
  for (int c = threadIdx.x; c < cols; c += 32) acc = merge(acc, MaxSum{in[c], 1.f});
  #pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) {
    MaxSum other;
    other.m = __shfl_xor_sync(0xffffffff, acc.m, mask);
    other.s = __shfl_xor_sync(0xffffffff, acc.s, mask);
    acc = merge(acc, other);
  }
  const float scale = 1.f / acc.s;
  for (int c = threadIdx.x; c < cols; c += 32) out[c] = __expf(in[c] - acc.m) * scale;
}

torch::Tensor softmax_online(torch::Tensor input) {
  const at::cuda::OptionalCUDAGuard device_guard(device_of(input));
  auto x = input.contiguous();
  auto out = at::empty_like(x);
  const int cols = static_cast<int>(x.size(-1));
  const int rows = static_cast<int>(x.numel() / cols);
  const dim3 block(32, 4);
  const dim3 grid((rows + block.y - 1) / block.y);
  cudaStream_t stream = at::cuda::getCurrentCUDAStream();
  online_softmax<<<grid, block, 0, stream>>>(x.data_ptr<float>(), out.data_ptr<float>(), rows, cols);
  AT_CUDA_CHECK(cudaGetLastError());
  return out;
}
'''

cpp_source = 'torch::Tensor softmax_online(torch::Tensor input);'

_C = load_inline(
    name='softmax_online_ext',
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=['softmax_online'],
    extra_cuda_cflags=['-O3', '-lineinfo'],
)


class ModelNew(nn.Module):
    def forward(self, x):
        return _C.softmax_online(x)
"""

LOG_SOFTMAX = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>
#include <limits>

template <typename scalar_t>
__global__ void log_softmax_kernel(
    const scalar_t* __restrict__ input, scalar_t* __restrict__ output, int dim_size) {

  // raw bytes, because the kernel is compiled for more than one type
  extern __shared__ unsigned char smem_raw[];
  scalar_t* smem = reinterpret_cast<scalar_t*>(smem_raw);

  const scalar_t* in = input + blockIdx.x * dim_size;
  scalar_t* out = output + blockIdx.x * dim_size;

  scalar_t max_val = -std::numeric_limits<scalar_t>::infinity();
  for (int i = threadIdx.x; i < dim_size; i += blockDim.x) {
    max_val = in[i] > max_val ? in[i] : max_val;
  }
  smem[threadIdx.x] = max_val;
  __syncthreads();
  for (int s = blockDim.x / 2; s > 0; s /= 2) {
    if (threadIdx.x < s && smem[threadIdx.x + s] > smem[threadIdx.x]) {
      smem[threadIdx.x] = smem[threadIdx.x + s];
    }
    __syncthreads();
  }
  max_val = smem[0];
  __syncthreads();

  scalar_t sum = 0;
  for (int i = threadIdx.x; i < dim_size; i += blockDim.x) {
    sum += exp(in[i] - max_val);
  }
  smem[threadIdx.x] = sum;
  __syncthreads();
  for (int s = blockDim.x / 2; s > 0; s /= 2) {
    if (threadIdx.x < s) {
      smem[threadIdx.x] += smem[threadIdx.x + s];
    }
    __syncthreads();
  }
  const scalar_t log_sum = log(smem[0]);

  for (int i = threadIdx.x; i < dim_size; i += blockDim.x) {
    out[i] = in[i] - max_val - log_sum;
  }
}

torch::Tensor log_softmax_forward(torch::Tensor input, int64_t dim) {
  TORCH_CHECK(input.is_cuda(), "input must be a CUDA tensor");
  dim = dim < 0 ? dim + input.dim() : dim;
  TORCH_CHECK(dim == input.dim() - 1, "only the last dimension is supported, not ", dim);
  input = input.contiguous();
  auto output = torch::empty_like(input);
  const int dim_size = input.size(dim);
  const int batch_size = input.numel() / dim_size;
  const int threads = 512;

  AT_DISPATCH_FLOATING_TYPES(input.scalar_type(), "log_softmax_forward", ([&] {
    log_softmax_kernel<scalar_t><<<batch_size, threads, threads * sizeof(scalar_t)>>>(
        input.data_ptr<scalar_t>(), output.data_ptr<scalar_t>(), dim_size);
  }));
  return output;
}
"""

cpp_source = """
torch::Tensor log_softmax_forward(torch::Tensor input, int64_t dim);
"""

log_softmax_ext = load_inline(
    name="log_softmax_dispatch",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["log_softmax_forward"],
    verbose=False,
    extra_cuda_cflags=["-O3"],
)


class ModelNew(nn.Module):
    def __init__(self, dim: int = -1):
        super(ModelNew, self).__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return log_softmax_ext.log_softmax_forward(x, self.dim)
'''

LOGSUMEXP = plain_module(
    name="logsumexp_warp",
    functions="logsumexp_rows",
    cuda_source="""
#include <torch/extension.h>
#include <cub/cub.cuh>

struct MaxOp {
    __device__ __forceinline__ float operator()(float a, float b) const { return a > b ? a : b; }
};

template <int BLOCK_THREADS>
__global__ void lse_kernel(const float* x, float* out, int n) {
    using BlockReduce = cub::BlockReduce<float, BLOCK_THREADS>;
    __shared__ typename BlockReduce::TempStorage storage;
    __shared__ float shift;

    const float* row = x + (size_t)blockIdx.x * n;
    float m = -3.402823466e+38f;
    for (int i = threadIdx.x; i < n; i += BLOCK_THREADS) m = fmaxf(m, row[i]);
    m = BlockReduce(storage).Reduce(m, MaxOp());
    if (threadIdx.x == 0) shift = m;
    __syncthreads();

    float s = 0.f;
    for (int i = threadIdx.x; i < n; i += BLOCK_THREADS) s += expf(row[i] - shift);
    s = BlockReduce(storage).Sum(s);
    if (threadIdx.x == 0) out[blockIdx.x] = shift + logf(s);
}

torch::Tensor logsumexp_rows(torch::Tensor x) {
    const auto rows = x.size(0);
    auto out = torch::empty({rows, 1}, x.options());
    lse_kernel<128><<<rows, 128>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.size(1));
    return out;
}
""",
    cpp_source="torch::Tensor logsumexp_rows(torch::Tensor x);",
    forward="ext.logsumexp_rows(x.contiguous())",
)

CASES = [
    CorpusCase(
        name="softmax_shared_memory",
        task=stateless_task("torch.softmax(x, dim=1)", "torch.randn(512, 2049)"),
        candidate=SOFTMAX_SHARED,
        features=("softmax", "shared", "macros", "get_last_error", "std_exception", "checks"),
    ),
    CorpusCase(
        name="softmax_online_warp",
        task=stateless_task("torch.softmax(x, dim=-1)", "torch.randn(4, 509, 777)"),
        candidate=SOFTMAX_ONLINE,
        features=("softmax", "warp", "struct", "cuda_context", "guard", "stream", "cuda_check"),
    ),
    CorpusCase(
        name="log_softmax_dispatch",
        task=stateless_task("F.log_softmax(x, dim=-1)", "torch.randn(300, 1000)"),
        candidate=LOG_SOFTMAX,
        features=("softmax", "dispatch", "template", "dynamic_shared", "int64_parameter", "checks"),
    ),
    CorpusCase(
        name="logsumexp_cub",
        task=stateless_task("torch.logsumexp(x, dim=1, keepdim=True)", "torch.randn(2000, 513)"),
        candidate=LOGSUMEXP,
        features=("softmax", "cub", "functor", "template"),
    ),
]
