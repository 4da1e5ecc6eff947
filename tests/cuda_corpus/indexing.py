"""Gathers, scatters, extremes' places and masks."""

from tests.cuda_corpus.case import CorpusCase, stateless_task

EMBEDDING_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, num_embeddings, embedding_dim):
        super().__init__()
        self.embedding = nn.Embedding(num_embeddings, embedding_dim)
        self.position = nn.Parameter(torch.randn(150, embedding_dim))

    def forward(self, tokens):
        return self.embedding(tokens) + self.position


def get_inputs():
    return [torch.randint(0, 3000, (64, 150))]


def get_init_inputs():
    return [3000, 100]
"""

EMBEDDING = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void embedding_add_kernel(
    const int64_t* __restrict__ tokens,
    const float* __restrict__ table,
    const float* __restrict__ position,
    float* __restrict__ out,
    int seq_len, int dim)
{
    const int b = blockIdx.y;
    const int s = blockIdx.x;
    const int64_t token = tokens[b * seq_len + s];
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        out[((int64_t)b * seq_len + s) * dim + d] = table[token * dim + d] + position[s * dim + d];
    }
}

torch::Tensor embedding_add(torch::Tensor tokens, torch::Tensor table, torch::Tensor position) {
    TORCH_CHECK(tokens.scalar_type() == at::kLong, "tokens must be int64");
    const auto batch = tokens.size(0);
    const auto seq_len = tokens.size(1);
    const auto dim = table.size(1);
    auto out = torch::empty({batch, seq_len, dim}, table.options());
    const dim3 grid(seq_len, batch);
    embedding_add_kernel<<<grid, 128>>>(
        tokens.data_ptr<int64_t>(), table.data_ptr<float>(), position.data_ptr<float>(), out.data_ptr<float>(), seq_len, dim);
    return out;
}
"""

cpp_source = """
torch::Tensor embedding_add(torch::Tensor tokens, torch::Tensor table, torch::Tensor position);
"""

embedding_ext = load_inline(
    name="embedding_add_ext",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["embedding_add"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self, num_embeddings, embedding_dim):
        super().__init__()
        self.embedding = nn.Embedding(num_embeddings, embedding_dim)
        self.position = nn.Parameter(torch.randn(150, embedding_dim))

    def forward(self, tokens):
        return embedding_ext.embedding_add(tokens.contiguous(), self.embedding.weight, self.position)
'''

ARGMAX = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = "torch::Tensor argmax_cuda(torch::Tensor x, int64_t dim);"
cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>
#include <cfloat>

struct Best {
    float value;
    int index;
};

// The larger value wins; of equal ones the earlier.
__device__ inline Best better(Best a, Best b) {
    if (b.value > a.value || (b.value == a.value && b.index < a.index)) return b;
    return a;
}

__global__ void argmax_kernel(const float* x, int64_t* out, int n) {
    __shared__ Best shared[256];
    const float* row = x + (int64_t)blockIdx.x * n;
    Best best = {-FLT_MAX, n};
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        best = better(best, Best{row[i], i});
    shared[threadIdx.x] = best;
    __syncthreads();
    for (int stride = blockDim.x / 2; stride > 0; stride >>= 1) {
        if (threadIdx.x < stride)
            shared[threadIdx.x] = better(shared[threadIdx.x], shared[threadIdx.x + stride]);
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = shared[0].index;
}

torch::Tensor argmax_cuda(torch::Tensor x, int64_t dim) {
    if (dim < 0) dim += x.dim();
    TORCH_CHECK(dim >= 0 && dim < x.dim(), "Invalid dimension: ", dim);
    // bring the reduced dimension to the end
    auto moved = x.transpose(dim, -1).contiguous();
    const int n = moved.size(-1);
    const int rows = moved.numel() / n;
    auto shape = moved.sizes().vec();
    shape.back() = 1;
    auto out = torch::empty(shape, x.options().dtype(torch::kLong));
    argmax_kernel<<<rows, 256>>>(moved.data_ptr<float>(), out.data_ptr<int64_t>(), n);
    return out.transpose(dim, -1).squeeze(dim);
}
"""

argmax = load_inline(
    name="argmax_ext", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["argmax_cuda"], verbose=True
)


class ModelNew(nn.Module):
    def __init__(self):
        super(ModelNew, self).__init__()
        self.dim = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return argmax.argmax_cuda(x, self.dim).contiguous()
'''

ARGMIN = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

# Custom CUDA kernel: argmin along the first dimension, one thread per column
cuda_source = """
#include <torch/extension.h>
#include <limits>

__global__ void argmin_dim0_kernel(const float* x, long* out, int rows, int cols) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c < cols) {
        float lowest = std::numeric_limits<float>::max();
        long where = 0;
        for (int r = 0; r < rows; r++) {
            const float v = x[(size_t)r * cols + c];
            if (v < lowest) { lowest = v; where = r; }
        }
        out[c] = where;
    }
}

torch::Tensor argmin_dim0(torch::Tensor x) {
    TORCH_CHECK(x.dim() == 2);
    const int rows = x.size(0), cols = x.size(1);
    auto out = torch::empty({cols}, torch::dtype(torch::kInt64).device(x.device()));
    argmin_dim0_kernel<<<(cols + 127) / 128, 128>>>(x.data_ptr<float>(), out.data_ptr<long>(), rows, cols);
    return out;
}
"""

cpp_source = (
    "torch::Tensor argmin_dim0(torch::Tensor x);"
)

argmin = load_inline(
    name="argmin_columns",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["argmin_dim0"],
    extra_cflags=["-O3"],
)


class ModelNew(nn.Module):
    def __init__(self):
        super(ModelNew, self).__init__()
        self.argmin = argmin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.argmin.argmin_dim0(x)
'''

HISTOGRAM = r'''
import torch
from torch.utils.cpp_extension import load_inline

BINS = 200

cuda_source = """
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>

__global__ void histogram_kernel(const int64_t* values, unsigned long long* counts, int64_t n, int bins) {
  extern __shared__ unsigned int local[];
  for (int b = threadIdx.x; b < bins; b += blockDim.x) local[b] = 0;
  __syncthreads();
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
    const int64_t v = values[i];
    if (v >= 0 && v < bins) atomicAdd(&local[v], 1u);
  }
  __syncthreads();
  for (int b = threadIdx.x; b < bins; b += blockDim.x)
    if (local[b]) atomicAdd(&counts[b], (unsigned long long)local[b]);
}

torch::Tensor histogram(torch::Tensor values, int64_t bins) {
  TORCH_CHECK(values.scalar_type() == c10::ScalarType::Long, "values must be int64");
  TORCH_CHECK(bins > 0 && bins <= 8192, "between 1 and 8192 bins are possible, not ", bins);
  auto v = values.contiguous();
  auto counts = torch::zeros({bins}, v.options());
  static_assert(sizeof(unsigned long long) == sizeof(int64_t), "counters are added to as unsigned long long");
  histogram_kernel<<<128, 512, bins * sizeof(unsigned int), c10::cuda::getCurrentCUDAStream()>>>(
      v.data_ptr<int64_t>(), reinterpret_cast<unsigned long long*>(counts.data_ptr<int64_t>()), v.numel(), bins);
  return counts;
}
"""
cpp_source = """
torch::Tensor histogram(torch::Tensor values, int64_t bins);
"""
lib = load_inline(name="histogram_shared", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["histogram"], verbose=False)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return lib.histogram(x, BINS)
'''

INDEX_ADD = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

template <typename index_t>
__global__ void index_add_kernel(float* out, const index_t* index, const float* src, int rows, int cols, int out_rows)
{
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    int r = blockIdx.y * blockDim.y + threadIdx.y;
    if (r < rows && c < cols)
    {
        index_t target = index[r];
        if (target >= 0 && target < out_rows)
            atomicAdd(out + target * cols + c, src[(size_t)r * cols + c]);
    }
}

torch::Tensor index_add_rows(torch::Tensor src, torch::Tensor index, int64_t out_rows)
{
    int rows = src.size(0), cols = src.size(1);
    auto out = torch::zeros({out_rows, cols}, src.options());
    dim3 block(32, 8), grid((cols + 31) / 32, (rows + 7) / 8);
    if (index.scalar_type() == torch::kInt32)
        index_add_kernel<int><<<grid, block>>>(out.data_ptr<float>(), index.data_ptr<int>(), src.data_ptr<float>(), rows, cols, out_rows);
    else
        index_add_kernel<int64_t><<<grid, block>>>(
            out.data_ptr<float>(), index.data_ptr<int64_t>(), src.data_ptr<float>(), rows, cols, out_rows);
    return out;
}
"""

cpp_source = """
torch::Tensor index_add_rows(torch::Tensor src, torch::Tensor index, int64_t out_rows);
"""

scatter = load_inline(
    name='index_add_atomics',
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=['index_add_rows'],
    with_cuda=True,
    extra_cuda_cflags=['-O3'],
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.out_rows = 96

    def forward(self, src, index):
        src, index = src.contiguous(), index.contiguous()
        return scatter.index_add_rows(src, index, self.out_rows)
'''

CASES = [
    CorpusCase(
        name="embedding_plus_position",
        task=EMBEDDING_TASK,
        candidate=EMBEDDING,
        features=("gather", "weights", "int64_input", "checks"),
    ),
    CorpusCase(
        name="argmax_of_the_middle",
        task=stateless_task("torch.argmax(x, dim=1)", "torch.randn(16, 300, 150)"),
        candidate=ARGMAX,
        features=("argmax", "struct", "shared", "int64_output", "transpose", "squeeze", "checks"),
    ),
    CorpusCase(
        name="argmin_of_columns",
        task=stateless_task("torch.argmin(x, dim=0)", "torch.randn(311, 2500)"),
        candidate=ARGMIN,
        features=("argmin", "int64_output", "tensor_options", "long_pointer"),
    ),
    CorpusCase(
        name="histogram_of_integers",
        task=stateless_task(
            "torch.zeros(200, dtype=torch.int64, device=x.device).scatter_add_(0, x, torch.ones_like(x))",
            "torch.randint(0, 200, (300000,))",
        ),
        candidate=HISTOGRAM,
        features=("scatter", "atomics", "dynamic_shared", "integers", "int64_input", "int64_output", "stream", "checks"),
    ),
    CorpusCase(
        name="index_add_of_rows",
        task=stateless_task(
            "torch.zeros(96, src.shape[1], device=src.device, dtype=src.dtype).index_add_(0, index, src)",
            "torch.randn(2000, 257), torch.randint(0, 96, (2000,))",
            "src, index",
        ),
        candidate=INDEX_ADD,
        features=("scatter", "atomics", "template", "int64_input", "int64_parameter"),
    ),
]
