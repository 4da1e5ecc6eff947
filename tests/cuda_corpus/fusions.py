"""Elementwise kernels that fuse several steps."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

LAYER_SCALE_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(dim) * 0.5)

    def forward(self, x, branch):
        return x + self.gamma * branch


def get_inputs():
    return [torch.randn(4, 197, 768), torch.randn(4, 197, 768)]


def get_init_inputs():
    return [768]
"""

LAYER_SCALE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/CUDAException.h>

// out[r, :] = x[r, :] + gamma[:] * branch[r, :], four columns at a time
__global__ void layer_scale_residual(const float4* __restrict__ x, const float4* __restrict__ branch,
                                     const float4* __restrict__ gamma, float4* __restrict__ out,
                                     int rows, int cols4) {
    const int c = threadIdx.x + blockIdx.x * blockDim.x;
    const int r = blockIdx.y * blockDim.y + threadIdx.y;
    if (r >= rows || c >= cols4) return;
    const float4 a = x[r * cols4 + c], b = branch[r * cols4 + c], g = __ldg(&gamma[c]);
    out[r * cols4 + c] = make_float4(fmaf(g.x, b.x, a.x), fmaf(g.y, b.y, a.y),
                                     fmaf(g.z, b.z, a.z), fmaf(g.w, b.w, a.w));
}

torch::Tensor layer_scale(torch::Tensor x, torch::Tensor branch, torch::Tensor gamma) {
    TORCH_CHECK(x.sizes() == branch.sizes(), "shapes differ: ", x.sizes(), " and ", branch.sizes());
    const int64_t dim = x.size(-1);
    TORCH_CHECK(gamma.numel() == dim && dim % 4 == 0, "gamma has ", gamma.numel(), " elements, rows have ", dim);
    x = x.contiguous();
    branch = branch.contiguous();
    auto out = torch::empty(x.sizes(), x.options());
    const int rows = x.numel() / dim, cols4 = dim / 4;
    const dim3 block(64, 4);
    const dim3 grid((cols4 + block.x - 1) / block.x, (rows + block.y - 1) / block.y);
    layer_scale_residual<<<grid, block, 0, c10::cuda::getCurrentCUDAStream()>>>(
        reinterpret_cast<const float4*>(x.data_ptr<float>()),
        reinterpret_cast<const float4*>(branch.data_ptr<float>()),
        reinterpret_cast<const float4*>(gamma.data_ptr<float>()),
        reinterpret_cast<float4*>(out.data_ptr<float>()), rows, cols4);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}
"""

cpp_source = "torch::Tensor layer_scale(torch::Tensor x, torch::Tensor branch, torch::Tensor gamma);"

ops = load_inline("layer_scale_ops", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["layer_scale"])


class ModelNew(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(dim) * 0.5)

    def forward(self, x, branch):
        return ops.layer_scale(x, branch, self.gamma)
'''

SWIGLU = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/types.h>
#include <cuda_runtime.h>

__global__ void swiglu_kernel(const float* __restrict__ gate_up, float* __restrict__ out, int rows, int hidden)
{
    int row = blockIdx.x;
    const float* gate = gate_up + (size_t)row * 2 * hidden;
    const float* up = gate + hidden;
    float* dst = out + (size_t)row * hidden;
    for (int j = threadIdx.x; j < hidden; j += blockDim.x)
    {
        float g = gate[j];
        dst[j] = g / (1.0f + expf(-g)) * up[j];
    }
}

torch::Tensor swiglu_forward(torch::Tensor gate_up)
{
    TORCH_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "expected [rows, 2 * hidden]");
    int rows = gate_up.size(0);
    int hidden = gate_up.size(1) / 2;
    torch::Tensor out = torch::empty({rows, hidden}, torch::TensorOptions().dtype(torch::kFloat32).device(gate_up.device()));
    swiglu_kernel<<<rows, 256>>>(gate_up.contiguous().data_ptr<float>(), out.data_ptr<float>(), rows, hidden);
    return out;
}
"""

cpp_source = "torch::Tensor swiglu_forward(torch::Tensor gate_up);"

swiglu = load_inline(
    name="swiglu_fused",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["swiglu_forward"],
    extra_cuda_cflags=["-O3"],
)


class ModelNew(nn.Module):
    """SwiGLU: the first half of every row gates the second."""

    def __init__(self):
        super().__init__()

    def forward(self, x):
        return swiglu.swiglu_forward(x)
'''

SCALE_CLAMP = plain_module(
    name="scale_shift_clamp",
    functions="scale_shift_clamp",
    cuda_source="""
#include <torch/extension.h>

struct Affine {
  float scale;
  float shift;
  float low;
  float high;
};

__global__ void affine_clamp(const float* a, const float* b, float* out, Affine p, int64_t count) {
  int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i >= count) return;
  float v = (a[i] + b[i]) * p.scale + p.shift;
  v = v < p.low ? p.low : (v > p.high ? p.high : v);
  out[i] = v * v;
}

torch::Tensor scale_shift_clamp(torch::Tensor a, torch::Tensor b, double scale, double shift, double low, double high) {
  TORCH_CHECK(a.numel() == b.numel(), "a has ", a.numel(), " elements and b has ", b.numel());
  auto a_ = a.contiguous(), b_ = b.contiguous();
  auto out = torch::empty_like(a_);
  Affine params{static_cast<float>(scale), static_cast<float>(shift), static_cast<float>(low), static_cast<float>(high)};
  const int64_t count = a_.numel();
  constexpr int kThreads = 512;
  const unsigned int grid = static_cast<unsigned int>((count + kThreads - 1) / kThreads);
  affine_clamp<<<grid, kThreads>>>(a_.data_ptr<float>(), b_.data_ptr<float>(), out.data_ptr<float>(), params, count);
  auto err = cudaGetLastError();
  TORCH_CHECK(err == cudaSuccess, "affine_clamp: ", cudaGetErrorString(err));
  return out;
}
""",
    cpp_source="""
torch::Tensor scale_shift_clamp(torch::Tensor a, torch::Tensor b, double scale, double shift, double low, double high);
""",
    args="a, b",
    forward="ext.scale_shift_clamp(a, b, 0.5, 0.1, -1.0, 1.5)",
    options="with_cuda=True",
)

CASES = [
    CorpusCase(
        name="layer_scale_residual_float4",
        task=LAYER_SCALE_TASK,
        candidate=LAYER_SCALE,
        features=("fusion", "weights", "vectorised", "stream", "launch_check", "sizes", "checks"),
    ),
    CorpusCase(
        name="swiglu_rows",
        task=stateless_task("F.silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :]", "torch.randn(512, 2 * 1377)"),
        candidate=SWIGLU,
        features=("fusion", "tensor_options", "types_header", "checks"),
    ),
    CorpusCase(
        name="scale_shift_clamp_struct",
        task=stateless_task(
            "torch.clamp((a + b) * 0.5 + 0.1, -1.0, 1.5) ** 2", "torch.randn(999, 1001), torch.randn(999, 1001)", "a, b"
        ),
        candidate=SCALE_CLAMP,
        features=("fusion", "struct", "double_parameter", "get_last_error", "constexpr", "checks"),
    ),
]
