"""Functions whose arguments and results are more than tensors."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

STATISTICS = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <tuple>

__global__ void row_statistics_kernel(const float* x, float* lo, float* hi, float* mean, int cols) {
    __shared__ float s_lo[256], s_hi[256], s_sum[256];
    const int t = threadIdx.x;
    const float* row = x + (size_t)blockIdx.x * cols;
    float a = row[0], b = row[0], s = 0.f;
    for (int c = t; c < cols; c += 256) {
        const float v = row[c];
        a = fminf(a, v);
        b = fmaxf(b, v);
        s += v;
    }
    s_lo[t] = a; s_hi[t] = b; s_sum[t] = s;
    __syncthreads();
    for (int k = 128; k > 0; k >>= 1) {
        if (t < k) {
            s_lo[t] = fminf(s_lo[t], s_lo[t + k]);
            s_hi[t] = fmaxf(s_hi[t], s_hi[t + k]);
            s_sum[t] += s_sum[t + k];
        }
        __syncthreads();
    }
    if (t == 0) {
        lo[blockIdx.x] = s_lo[0];
        hi[blockIdx.x] = s_hi[0];
        mean[blockIdx.x] = s_sum[0] / cols;
    }
}

std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> row_statistics(torch::Tensor x) {
    TORCH_CHECK(x.dim() == 2, "expected a matrix");
    const int64_t rows = x.size(0);
    auto lo = torch::empty({rows}, x.options()), hi = torch::empty({rows}, x.options()), mean = torch::empty({rows}, x.options());
    row_statistics_kernel<<<rows, 256>>>(
        x.data_ptr<float>(), lo.data_ptr<float>(), hi.data_ptr<float>(), mean.data_ptr<float>(), x.size(1));
    return {lo, hi, mean};
}
"""

cpp_source = """
#include <torch/extension.h>
#include <tuple>
std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> row_statistics(torch::Tensor x);
"""

stats = load_inline(
    name="row_statistics",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["row_statistics"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        lo, hi, mean = stats.row_statistics(x.contiguous())
        return lo, hi, mean
'''

LIST_OF_TENSORS = plain_module(
    name="weighted_sum_of_list",
    functions="weighted_sum",
    cuda_source="""
#include <torch/extension.h>
#include <vector>

constexpr int MAX_TENSORS = 8;

struct Inputs {
    const float* data[MAX_TENSORS];
    float weight[MAX_TENSORS];
    int count;
};

__global__ void weighted_sum_kernel(Inputs inputs, float* out, long n) {
    const long i = (long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        float acc = 0.f;
        for (int t = 0; t < inputs.count; ++t) acc += inputs.weight[t] * inputs.data[t][i];
        out[i] = acc;
    }
}

torch::Tensor weighted_sum(std::vector<torch::Tensor> tensors, std::vector<double> weights) {
    TORCH_CHECK(!tensors.empty() && tensors.size() <= MAX_TENSORS, "between 1 and ", MAX_TENSORS, " tensors, got ", tensors.size());
    TORCH_CHECK(tensors.size() == weights.size(), "every tensor needs a weight");
    Inputs inputs{};
    inputs.count = tensors.size();
    for (size_t t = 0; t < tensors.size(); ++t) {
        TORCH_CHECK(tensors[t].sizes() == tensors[0].sizes(), "tensor ", t, " has another shape than the first");
        TORCH_CHECK(tensors[t].is_contiguous(), "tensor ", t, " is not contiguous");
        inputs.data[t] = tensors[t].data_ptr<float>();
        inputs.weight[t] = weights[t];
    }
    auto out = torch::empty_like(tensors[0]);
    const long n = out.numel();
    weighted_sum_kernel<<<(n + 255) / 256, 256>>>(inputs, out.data_ptr<float>(), n);
    return out;
}
""",
    cpp_source="torch::Tensor weighted_sum(std::vector<torch::Tensor> tensors, std::vector<double> weights);",
    args="a, b, c",
    forward="ext.weighted_sum([a, b, c], [0.5, -1.0, 0.25])",
)

OPTIONAL = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <optional>

__global__ void scale_residual_kernel(const float* x, const float* scale, const float* residual, float* y,
                                      int64_t n, int cols) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float v = x[i];
  if (scale) v *= scale[i % cols];
  if (residual) v += residual[i];
  y[i] = v;
}

at::Tensor scale_residual(const at::Tensor& x, const std::optional<at::Tensor>& scale,
                          const std::optional<at::Tensor>& residual, std::optional<double> factor) {
  const int cols = x.size(-1);
  const at::Tensor xc = x.contiguous();
  const float* s = scale ? scale->data_ptr<float>() : nullptr;
  at::Tensor rc;
  if (residual.has_value()) {
    TORCH_CHECK(residual->sizes() == x.sizes(), "residual: ", residual->sizes(), " is not ", x.sizes());
    rc = residual->contiguous();
  }
  at::Tensor y = at::empty_like(xc);
  scale_residual_kernel<<<(xc.numel() + 255) / 256, 256>>>(
      xc.data_ptr<float>(), s, rc.defined() ? rc.data_ptr<float>() : nullptr, y.data_ptr<float>(), xc.numel(), cols);
  TORCH_CHECK(factor.value_or(1.0) == 1.0, "other factors than 1 are not implemented");
  return y;
}
"""

cpp_source = """
#include <optional>
at::Tensor scale_residual(const at::Tensor& x, const std::optional<at::Tensor>& scale,
                          const std::optional<at::Tensor>& residual, std::optional<double> factor);
"""

ext = load_inline(
    name="scale_residual_optional", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["scale_residual"]
)


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x):
        scaled = ext.scale_residual(x, self.scale, None, None)
        return ext.scale_residual(scaled, None, x, 1.0)
'''

SCALE_TASK = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x * self.scale + x


def get_inputs():
    return [torch.randn(900, 601)]


def get_init_inputs():
    return [601]
"""

NAMED_REDUCTION = plain_module(
    name="huber_named_reduction",
    functions="huber",
    cuda_source="""
#include <torch/extension.h>
#include <string>

__global__ void huber_kernel(const float* p, const float* t, float* out, float delta, int n, bool elementwise, float factor) {
    float acc = 0.f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        const float d = fabsf(p[i] - t[i]);
        const float v = d <= delta ? 0.5f * d * d : delta * (d - 0.5f * delta);
        if (elementwise) out[i] = v;
        acc += v;
    }
    if (elementwise) return;
    for (int o = 16; o > 0; o /= 2) acc += __shfl_down_sync(0xffffffff, acc, o);
    if (threadIdx.x % 32 == 0) atomicAdd(out, acc * factor);
}

torch::Tensor huber(torch::Tensor p, torch::Tensor t, double delta, const std::string& reduction) {
    const int n = p.numel();
    const bool elementwise = reduction == "none";
    float factor = 1.f;
    if (reduction == "mean") {
        factor = 1.f / n;
    } else {
        TORCH_CHECK(elementwise || reduction == "sum", "unknown reduction '", reduction, "'");
    }
    auto out = elementwise ? torch::empty_like(p) : torch::zeros({}, p.options());
    huber_kernel<<<256, 256>>>(p.data_ptr<float>(), t.data_ptr<float>(), out.data_ptr<float>(), delta, n, elementwise, factor);
    return out;
}
""",
    cpp_source="torch::Tensor huber(torch::Tensor p, torch::Tensor t, double delta, const std::string& reduction);",
    args="p, t",
    forward='ext.huber(p.contiguous(), t.contiguous(), 0.75, "mean")',
)

SEVERAL = r"""
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = '''
#include <torch/extension.h>
#include <vector>

__global__ void sincos_kernel(const float* x, float* s, float* c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sincosf(x[i], &s[i], &c[i]);
}

__global__ void blend_kernel(const float* a, const float* b, float* out, int n, float w, bool square) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        float v = w * a[i] + (1.0f - w) * b[i];
        out[i] = square ? v * v : v;
    }
}

static int blocks_for(int64_t n) { return static_cast<int>((n + 255) / 256); }

std::vector<torch::Tensor> sin_and_cos(const torch::Tensor& x) {
    auto s = torch::empty_like(x), c = torch::empty_like(x);
    sincos_kernel<<<blocks_for(x.numel()), 256>>>(x.data_ptr<float>(), s.data_ptr<float>(), c.data_ptr<float>(), x.numel());
    return {s, c};
}

torch::Tensor blend(torch::Tensor a, torch::Tensor b, float weight, bool square) {
    auto out = torch::empty_like(a);
    blend_kernel<<<blocks_for(a.numel()), 256>>>(
        a.data_ptr<float>(), b.data_ptr<float>(), out.data_ptr<float>(), a.numel(), weight, square);
    return out;
}

int64_t count_elements(const torch::Tensor& x) { return x.numel(); }

bool on_gpu(torch::Tensor x) { return x.device().is_cuda(); }
'''

cpp_source = '''
std::vector<torch::Tensor> sin_and_cos(const torch::Tensor& x);
torch::Tensor blend(torch::Tensor a, torch::Tensor b, float weight, bool square);
int64_t count_elements(const torch::Tensor& x);
bool on_gpu(torch::Tensor x);
'''

waves = load_inline(
    name='sin_cos_blend',
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=['sin_and_cos', 'blend', 'count_elements', 'on_gpu'],
    verbose=False,
)


class ModelNew(nn.Module):
    def forward(self, x):
        assert waves.on_gpu(x)
        x = x.contiguous()
        s, c = waves.sin_and_cos(x)
        assert waves.count_elements(s) == x.numel()
        return waves.blend(s, c, 0.25, True)
"""

CASES = [
    CorpusCase(
        name="tuple_of_row_statistics",
        task=stateless_task("torch.amin(x, dim=1), torch.amax(x, dim=1), torch.mean(x, dim=1)", "torch.randn(1111, 703)"),
        candidate=STATISTICS,
        features=("tuple_result", "shared", "reduction", "checks"),
    ),
    CorpusCase(
        name="weighted_sum_of_a_list",
        task=stateless_task(
            "0.5 * a - b + 0.25 * c", ", ".join(["torch.randn(500, 801)"] * 3), "a, b, c"
        ),
        candidate=LIST_OF_TENSORS,
        features=("vector_parameter", "tensor_list", "struct", "checks"),
    ),
    CorpusCase(
        name="optional_scale_and_residual",
        task=SCALE_TASK,
        candidate=OPTIONAL,
        features=("optional", "weights", "at_tensor", "const_reference", "checks"),
    ),
    CorpusCase(
        name="huber_with_named_reduction",
        task=stateless_task("F.huber_loss(p, t, delta=0.75)", "torch.randn(611, 907), torch.randn(611, 907)", "p, t"),
        candidate=NAMED_REDUCTION,
        features=("string_parameter", "atomics", "loss", "scalar_output", "double_parameter", "checks"),
    ),
    CorpusCase(
        name="four_functions_of_several_types",
        task=stateless_task("(0.25 * torch.sin(x) + 0.75 * torch.cos(x)) ** 2", "torch.randn(777, 900)"),
        candidate=SEVERAL,
        features=("several_functions", "vector_result", "int64_result", "bool_result", "bool_parameter", "float_parameter"),
    ),
]
