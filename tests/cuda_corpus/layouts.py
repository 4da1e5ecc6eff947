"""Kernels that move elements: transposes, permutations, padding, triangles."""

from tests.cuda_corpus.case import CorpusCase, stateless_task

TRANSPOSE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

#define EDGE 32
#define STEP 8

// A square goes through shared memory, so that reads and writes both run along rows
__global__ void transpose_kernel(const float* __restrict__ src, float* __restrict__ dst, int rows, int cols) {
    __shared__ float tile[EDGE][EDGE + 1];

    int x = blockIdx.x * EDGE + threadIdx.x;
    int y = blockIdx.y * EDGE + threadIdx.y;
    for (int j = 0; j < EDGE; j += STEP) {
        if (x < cols && y + j < rows) {
            tile[threadIdx.y + j][threadIdx.x] = src[(y + j) * cols + x];
        }
    }
    __syncthreads();

    x = blockIdx.y * EDGE + threadIdx.x;
    y = blockIdx.x * EDGE + threadIdx.y;
    for (int j = 0; j < EDGE; j += STEP) {
        if (x < rows && y + j < cols) {
            dst[(y + j) * rows + x] = tile[threadIdx.x][threadIdx.y + j];
        }
    }
}

torch::Tensor transpose_cuda(torch::Tensor input) {
    const int rows = input.size(0);
    const int cols = input.size(1);
    auto output = torch::empty({cols, rows}, input.options());
    dim3 block(EDGE, STEP);
    dim3 grid((cols + EDGE - 1) / EDGE, (rows + EDGE - 1) / EDGE);
    transpose_kernel<<<grid, block>>>(input.data_ptr<float>(), output.data_ptr<float>(), rows, cols);
    return output;
}
"""

cpp_source = "torch::Tensor transpose_cuda(torch::Tensor input);"

transpose = load_inline(
    name="transpose_tiles",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["transpose_cuda"],
    verbose=True,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return transpose.transpose_cuda(x.contiguous())
'''

PERMUTE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <array>
#include <vector>

constexpr int MAX_DIMS = 6;

struct Plan {
  int dims;
  int64_t sizes[MAX_DIMS];     // of the result
  int64_t strides[MAX_DIMS];   // of the source, in the order of the result
};

__global__ void permute_kernel(const float* src, float* dst, Plan plan, int64_t n) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= n) return;
  int64_t rest = i, from = 0;
  for (int d = plan.dims - 1; d >= 0; --d) {
    from += rest % plan.sizes[d] * plan.strides[d];
    rest /= plan.sizes[d];
  }
  dst[i] = src[from];
}

torch::Tensor permute_copy(const torch::Tensor& x, std::vector<int64_t> order) {
  TORCH_CHECK(static_cast<int64_t>(order.size()) == x.dim(), "order has ", order.size(), " entries, x has ", x.dim(), " dimensions");
  TORCH_CHECK(x.dim() <= MAX_DIMS, "too many dimensions: ", x.dim());
  Plan plan;
  plan.dims = static_cast<int>(order.size());
  std::vector<int64_t> shape;
  for (size_t d = 0; d < order.size(); ++d) {
    plan.sizes[d] = x.size(order[d]);
    plan.strides[d] = x.stride(order[d]);
    shape.push_back(plan.sizes[d]);
  }
  auto y = torch::empty(shape, x.options());
  const int64_t n = y.numel();
  permute_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), plan, n);
  return y;
}
"""

cpp_source = """
#include <vector>
torch::Tensor permute_copy(const torch::Tensor& x, std::vector<int64_t> order);
"""

permute = load_inline(
    name="permute_any",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["permute_copy"],
)


class ModelNew(nn.Module):
    ORDER = (0, 2, 3, 1)

    def forward(self, x):
        return permute.permute_copy(x, list(self.ORDER))
'''

PIXEL_SHUFFLE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = "torch::Tensor pixel_shuffle(torch::Tensor input, int64_t upscale_factor);"

cuda_source = """
#include <torch/extension.h>
#include <cuda.h>
#include <cuda_runtime.h>

__global__ void pixel_shuffle_kernel(const float* in, float* out, int C, int H, int W, int r, int total)
{
    int idx = blockIdx.x * blockDim.x + threadIdx.x;
    if (idx >= total) return;
    const int OW = W * r, OH = H * r;
    int ow = idx % OW;
    int oh = idx / OW % OH;
    int c = idx / (OW * OH) % C;
    int n = idx / (OW * OH * C);
    int ic = c * r * r + (oh % r) * r + ow % r;
    out[idx] = in[((n * C * r * r + ic) * H + oh / r) * W + ow / r];
}

torch::Tensor pixel_shuffle(torch::Tensor input, int64_t upscale_factor)
{
    const auto N = input.size(0), CR = input.size(1), H = input.size(2), W = input.size(3);
    TORCH_CHECK(CR % (upscale_factor * upscale_factor) == 0, "channels must be divisible by the square of ", upscale_factor);
    const auto C = CR / (upscale_factor * upscale_factor);
    auto output = torch::empty({N, C, H * upscale_factor, W * upscale_factor}, input.options());
    const int total = output.numel();
    pixel_shuffle_kernel<<<(total + 255) / 256, 256>>>(
        input.contiguous().data_ptr<float>(), output.data_ptr<float>(), C, H, W, upscale_factor, total);
    return output;
}
"""

shuffle_module = load_inline(
    name="pixel_shuffle_ext",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["pixel_shuffle"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.upscale_factor = 3

    def forward(self, x):
        return shuffle_module.pixel_shuffle(x, self.upscale_factor)
'''

TRIL = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>

#define TILE 16

// C = tril(A B) for lower triangular A and B: what lies above the diagonal is not computed.
__global__ void tril_matmul_kernel(const float* A, const float* B, float* C, int n) {
    __shared__ float a[TILE][TILE], b[TILE][TILE + 1];
    const int row = blockIdx.y * TILE + threadIdx.y, col = blockIdx.x * TILE + threadIdx.x;
    if (blockIdx.x > blockIdx.y) {          // the whole tile is above the diagonal
        if (row < n && col < n) C[row * n + col] = 0.f;
        return;
    }
    float acc = 0.f;
    // A[row, k] is zero for k > row, and B[k, col] for k < col
    for (int t = blockIdx.x; t <= blockIdx.y; ++t) {
        const int ka = t * TILE + threadIdx.x, kb = t * TILE + threadIdx.y;
        a[threadIdx.y][threadIdx.x] = row < n && ka < n ? A[row * n + ka] : 0.f;
        b[threadIdx.y][threadIdx.x] = kb < n && col < n ? B[kb * n + col] : 0.f;
        __syncthreads();
        for (int k = 0; k < TILE; ++k) acc += a[threadIdx.y][k] * b[k][threadIdx.x];
        __syncthreads();
    }
    if (row < n && col < n) C[row * n + col] = col <= row ? acc : 0.f;
}

torch::Tensor tril_matmul(torch::Tensor A, torch::Tensor B) {
    TORCH_CHECK(A.size(0) == A.size(1) && B.sizes() == A.sizes(), "square matrices of one size expected");
    const int n = A.size(0);
    auto C = torch::empty_like(A);
    const int tiles = (n + TILE - 1) / TILE;
    tril_matmul_kernel<<<dim3(tiles, tiles), dim3(TILE, TILE)>>>(A.data_ptr<float>(), B.data_ptr<float>(), C.data_ptr<float>(), n);
    return C;
}
"""
cpp_source = "torch::Tensor tril_matmul(torch::Tensor A, torch::Tensor B);"

tril = load_inline(
    name="tril_product", cpp_sources=cpp_source, cuda_sources=cuda_source,
    functions=["tril_matmul"], extra_cflags=["-O3"], extra_cuda_cflags=["-O3"],
)


class ModelNew(nn.Module):
    """
    Product of two lower triangular matrices. Tiles above the diagonal are skipped.
    """

    def __init__(self):
        super(ModelNew, self).__init__()

    def forward(self, A, B):
        """
        Args:
            A: lower triangular matrix of shape (N, N)
            B: lower triangular matrix of shape (N, N)
        """
        return tril.tril_matmul(A.contiguous(), B.contiguous())
'''

CASES = [
    CorpusCase(
        name="transpose_padded_tiles",
        task=stateless_task("x.transpose(0, 1).contiguous()", "torch.randn(1003, 777)"),
        candidate=TRANSPOSE,
        features=("layout", "shared", "macros"),
    ),
    CorpusCase(
        name="permute_by_a_list",
        task=stateless_task("x.permute(0, 2, 3, 1).contiguous()", "torch.randn(8, 30, 51, 57)"),
        candidate=PERMUTE,
        features=("layout", "struct", "vector_parameter", "stride", "const_reference", "checks"),
    ),
    CorpusCase(
        name="pixel_shuffle",
        task=stateless_task("F.pixel_shuffle(x, 3)", "torch.randn(4, 36, 65, 61)"),
        candidate=PIXEL_SHUFFLE,
        features=("layout", "int64_parameter", "checks"),
    ),
    CorpusCase(
        name="lower_triangular_product",
        task=stateless_task("torch.tril(torch.matmul(A, B))", "torch.tril(torch.randn(500, 500)), torch.tril(torch.randn(500, 500))", "A, B"),
        candidate=TRIL,
        features=("layout", "matmul", "shared", "macros", "checks"),
    ),
]
