"""Losses."""

from tests.cuda_corpus.case import CorpusCase, stateless_task

MSE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void mse_kernel(const float* pred, const float* target, float* loss, int n) {
    extern __shared__ float sdata[];

    unsigned int tid = threadIdx.x;
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned int grid_size = blockDim.x * gridDim.x;

    float sum = 0.0f;
    while (i < n) {
        float diff = pred[i] - target[i];
        sum += diff * diff;
        i += grid_size;
    }
    sdata[tid] = sum;
    __syncthreads();

    for (unsigned int s = blockDim.x / 2; s > 0; s >>= 1) {
        if (tid < s) sdata[tid] += sdata[tid + s];
        __syncthreads();
    }

    if (tid == 0) atomicAdd(loss, sdata[0] / n);
}

torch::Tensor mse_loss_cuda(torch::Tensor predictions, torch::Tensor targets) {
    TORCH_CHECK(predictions.numel() == targets.numel(), "predictions and targets must have the same size");
    const int n = predictions.numel();
    auto loss = torch::zeros({}, predictions.options());

    const int threads = 256;
    const int blocks = std::min((n + threads - 1) / threads, 1024);
    mse_kernel<<<blocks, threads, threads * sizeof(float)>>>(
        predictions.data_ptr<float>(), targets.data_ptr<float>(), loss.data_ptr<float>(), n);

    return loss;
}
"""

cpp_source = "torch::Tensor mse_loss_cuda(torch::Tensor predictions, torch::Tensor targets);"

mse = load_inline(
    name="mse_loss",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["mse_loss_cuda"],
    verbose=True,
    extra_cflags=["-O3"],
    extra_ldflags=[""],
)


class ModelNew(nn.Module):
    def __init__(self):
        super(ModelNew, self).__init__()
        self.mse = mse

    def forward(self, predictions, targets):
        return self.mse.mse_loss_cuda(predictions.contiguous(), targets.contiguous())
'''

CROSS_ENTROPY = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

namespace ce {

constexpr int kThreads = 128;

template <typename Op>
__device__ float block_all_reduce(float v, float init, Op op) {
  __shared__ float slots[kThreads / 32];
  for (int o = 16; o > 0; o >>= 1) v = op(v, __shfl_xor_sync(0xffffffff, v, o));
  __syncthreads();
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = v;
  __syncthreads();
  float r = init;
  for (float s : slots) r = op(r, s);
  return r;
}

struct Max { __device__ float operator()(float a, float b) const { return fmaxf(a, b); } };
struct Sum { __device__ float operator()(float a, float b) const { return a + b; } };

__global__ void row_loss(const float* logits, const int64_t* target, float* losses, int classes) {
  const float* row = logits + static_cast<int64_t>(blockIdx.x) * classes;
  float m = -INFINITY;
  for (int c = threadIdx.x; c < classes; c += kThreads) m = fmaxf(m, row[c]);
  m = block_all_reduce(m, -INFINITY, Max{});
  float s = 0.f;
  for (int c = threadIdx.x; c < classes; c += kThreads) s += expf(row[c] - m);
  s = block_all_reduce(s, 0.f, Sum{});
  if (threadIdx.x == 0) losses[blockIdx.x] = logf(s) + m - row[target[blockIdx.x]];
}

__global__ void mean(const float* losses, float* out, int n) {
  float s = 0.f;
  for (int i = threadIdx.x; i < n; i += kThreads) s += losses[i];
  s = block_all_reduce(s, 0.f, Sum{});
  if (threadIdx.x == 0) *out = s / n;
}

}  // namespace ce

torch::Tensor cross_entropy(torch::Tensor logits, torch::Tensor target) {
  TORCH_CHECK(logits.dim() == 2, "logits: two dimensions expected, got ", logits.dim());
  TORCH_CHECK(target.scalar_type() == torch::kInt64, "target: int64 expected, got ", target.scalar_type());
  const at::cuda::CUDAGuard guard(logits.device());
  logits = logits.contiguous();
  target = target.contiguous();
  const int n = logits.size(0), classes = logits.size(1);
  auto losses = torch::empty({n}, logits.options());
  auto out = torch::empty({}, logits.options());
  const auto stream = at::cuda::getCurrentCUDAStream();
  ce::row_loss<<<n, ce::kThreads, 0, stream>>>(
      logits.data_ptr<float>(), target.data_ptr<int64_t>(), losses.data_ptr<float>(), classes);
  ce::mean<<<1, ce::kThreads, 0, stream>>>(losses.data_ptr<float>(), out.data_ptr<float>(), n);
  return out;
}
"""

cpp_source = "torch::Tensor cross_entropy(torch::Tensor logits, torch::Tensor target);"

loss = load_inline(name="cross_entropy_rows", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["cross_entropy"])


class ModelNew(nn.Module):
    def forward(self, predictions, targets):
        return loss.cross_entropy(predictions, targets)
'''

HINGE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

// Partial sums of clamp(1 - prediction * target, min=0); Python takes the last step.
__global__ void hinge_kernel(const float* __restrict__ p, const float* __restrict__ t, float* __restrict__ partial,
                             int rows, int cols) {
    __shared__ float cache[8];
    float acc = 0.0f;
    for (int r = blockIdx.x; r < rows; r += gridDim.x) {
        const float target = t[r];
        for (int c = threadIdx.x; c < cols; c += blockDim.x) {
            acc += fmaxf(0.0f, 1.0f - p[r * cols + c] * target);
        }
    }
    for (int o = 16; o > 0; o /= 2) acc += __shfl_down_sync(0xffffffff, acc, o);
    if (threadIdx.x % 32 == 0) cache[threadIdx.x / 32] = acc;
    __syncthreads();
    if (threadIdx.x < 8) {
        acc = cache[threadIdx.x];
        for (int o = 4; o > 0; o /= 2) acc += __shfl_down_sync(0xff, acc, o);
        if (threadIdx.x == 0) partial[blockIdx.x] = acc;
    }
}

torch::Tensor hinge_partial(torch::Tensor predictions, torch::Tensor targets) {
    auto p = predictions.contiguous();
    auto t = targets.reshape({-1}).contiguous();
    const int rows = p.size(0);
    const int cols = p.size(1);
    const int blocks = rows < 264 ? rows : 264;
    auto partial = torch::empty({blocks}, p.options());
    hinge_kernel<<<blocks, 256>>>(p.data_ptr<float>(), t.data_ptr<float>(), partial.data_ptr<float>(), rows, cols);
    return partial;
}
"""

cpp_source = "torch::Tensor hinge_partial(torch::Tensor predictions, torch::Tensor targets);"

hinge_ext = load_inline(
    name="hinge_loss",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["hinge_partial"],
    verbose=False,
)


class ModelNew(nn.Module):
    """Hinge loss: one kernel for the partial sums, the rest in Python."""

    def __init__(self):
        super(ModelNew, self).__init__()
        self.hinge = hinge_ext.hinge_partial

    def forward(self, predictions, targets):
        partial = self.hinge(predictions, targets)
        return partial.sum() / predictions.numel()
'''

KL = r'''
import torch
from torch import nn
from torch.utils import cpp_extension
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cub/block/block_reduce.cuh>

__global__ void kl_kernel(const float* predictions, const float* targets, double* sum, long n)
{
    typedef cub::BlockReduce<double, 256> BlockReduce;
    __shared__ BlockReduce::TempStorage storage;
    double mine = 0;
    for (long i = blockIdx.x * 256L + threadIdx.x; i < n; i += 256L * gridDim.x)
    {
        const float t = targets[i];
        if (t > 0.f)
            mine += t * (logf(t) - logf(predictions[i]));
    }
    const double block_total = BlockReduce(storage).Sum(mine);
    if (threadIdx.x == 0)
        atomicAdd(sum, block_total);
}

torch::Tensor kl_div_batchmean(torch::Tensor predictions, torch::Tensor targets)
{
    auto sum = torch::zeros({1}, torch::TensorOptions().dtype(torch::kDouble).device(predictions.device()));
    const long n = predictions.numel();
    kl_kernel<<<256, 256>>>(predictions.data_ptr<float>(), targets.data_ptr<float>(), sum.data_ptr<double>(), n);
    AT_ASSERT(cudaGetLastError() == cudaSuccess);
    return sum.div_((double)predictions.size(0)).to(torch::kFloat32).squeeze(0);
}
"""

cpp_source = "torch::Tensor kl_div_batchmean(torch::Tensor predictions, torch::Tensor targets);"


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        # built when the model is made
        self.ops = load_inline(
            name="kl_divergence",
            cpp_sources=cpp_source,
            cuda_sources=cuda_source,
            functions=["kl_div_batchmean"],
        )

    def forward(self, predictions, targets):
        return self.ops.kl_div_batchmean(predictions.contiguous(), targets.contiguous())
'''

TRIPLET = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = """torch::Tensor triplet_rows(torch::Tensor a, torch::Tensor p, torch::Tensor n, float margin);"""

cuda_source = """
#include <torch/extension.h>
#include <math.h>

__global__ void triplet_kernel(const float* a, const float* p, const float* n, float* out, int dim, float margin, float eps) {
    const size_t base = (size_t)blockIdx.x * dim;
    float dp = 0.f, dn = 0.f;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        float u = a[base + i] - p[base + i] + eps;
        float v = a[base + i] - n[base + i] + eps;
        dp += u * u;
        dn += v * v;
    }
    __shared__ float sp[256], sn[256];
    sp[threadIdx.x] = dp;
    sn[threadIdx.x] = dn;
    for (unsigned s = blockDim.x / 2; s >= 1; s /= 2) {
        __syncthreads();
        if (threadIdx.x < s) {
            sp[threadIdx.x] += sp[threadIdx.x + s];
            sn[threadIdx.x] += sn[threadIdx.x + s];
        }
    }
    if (threadIdx.x == 0) out[blockIdx.x] = fmaxf(sqrtf(sp[0]) - sqrtf(sn[0]) + margin, 0.f);
}

torch::Tensor triplet_rows(torch::Tensor a, torch::Tensor p, torch::Tensor n, float margin) {
    for (const auto& t : {a, p, n}) {
        TORCH_CHECK(t.is_cuda() && t.is_contiguous() && t.dim() == 2, "contiguous CUDA matrices expected");
    }
    auto out = torch::empty({a.size(0)}, a.options());
    triplet_kernel<<<a.size(0), 256>>>(a.data_ptr<float>(), p.data_ptr<float>(), n.data_ptr<float>(), out.data_ptr<float>(),
                                       a.size(1), margin, 1e-6f);
    return out;
}
"""

_triplet = load_inline("triplet_margin", cpp_sources=[cpp_source], cuda_sources=[cuda_source], functions=["triplet_rows"])


def triplet_loss(anchor, positive, negative, margin):
    return _triplet.triplet_rows(anchor, positive, negative, margin).mean()


class ModelNew(nn.Module):
    def __init__(self, margin=1.0):
        super().__init__()
        self.margin = margin

    def forward(self, anchor, positive, negative):
        return triplet_loss(anchor, positive, negative, self.margin)
'''

CASES = [
    CorpusCase(
        name="mse_loss_atomic",
        task=stateless_task(
            "torch.mean((predictions - targets) ** 2)", "torch.randn(128, 4097), torch.randn(128, 4097)", "predictions, targets"
        ),
        candidate=MSE,
        features=("loss", "atomics", "dynamic_shared", "scalar_output", "grid_stride", "checks"),
    ),
    CorpusCase(
        name="cross_entropy_two_kernels",
        task=stateless_task(
            "F.cross_entropy(predictions, targets)", "torch.randn(1000, 500), torch.randint(0, 500, (1000,))", "predictions, targets"
        ),
        candidate=CROSS_ENTROPY,
        features=("loss", "cuda_context", "guard", "stream", "functor", "int64_input", "warp", "scalar_output", "checks"),
    ),
    CorpusCase(
        name="hinge_loss_partial_sums",
        task=stateless_task(
            "torch.mean(torch.clamp(1 - predictions * targets, min=0))",
            "torch.randn(1003, 400), torch.randint(0, 2, (1003, 1)).float() * 2 - 1",
            "predictions, targets",
        ),
        candidate=HINGE,
        features=("loss", "warp", "shared", "reshape", "grid_stride"),
    ),
    CorpusCase(
        name="kl_divergence_double_atomics",
        task=stateless_task(
            'F.kl_div(torch.log(predictions), targets, reduction="batchmean")',
            "torch.softmax(torch.randn(300, 1777), dim=-1), torch.softmax(torch.randn(300, 1777), dim=-1)",
            "predictions, targets",
        ),
        candidate=KL,
        features=("loss", "cub", "atomics", "double", "tensor_options", "assert", "aten_methods"),
    ),
    CorpusCase(
        name="triplet_margin_rows",
        task=stateless_task(
            "F.triplet_margin_loss(anchor, positive, negative, margin=1.0)",
            ", ".join(["torch.randn(257, 1100)"] * 3),
            "anchor, positive, negative",
        ),
        candidate=TRIPLET,
        features=("loss", "shared", "initializer_list", "float_parameter", "checks"),
    ),
]
