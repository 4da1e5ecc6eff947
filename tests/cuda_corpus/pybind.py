"""Modules that bind by hand, with pybind11; these need PyTorch's whole header."""

from tests.cuda_corpus.case import CorpusCase, stateless_task

IN_THE_CPP_SOURCE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void square_plus_kernel(const float* a, const float* b, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] * a[i] + b[i];
}

torch::Tensor square_plus_cuda(torch::Tensor a, torch::Tensor b) {
    auto out = torch::empty_like(a);
    const int n = a.numel();
    square_plus_kernel<<<(n + 255) / 256, 256>>>(a.data_ptr<float>(), b.data_ptr<float>(), out.data_ptr<float>(), n);
    return out;
}
"""

cpp_source = """
#include <torch/extension.h>

torch::Tensor square_plus_cuda(torch::Tensor a, torch::Tensor b);

torch::Tensor square_plus(torch::Tensor a, torch::Tensor b) {
    TORCH_CHECK(a.is_cuda() && b.is_cuda(), "inputs must be CUDA tensors");
    TORCH_CHECK(a.sizes() == b.sizes(), "inputs must have the same shape");
    return square_plus_cuda(a.contiguous(), b.contiguous());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("square_plus", &square_plus, "a * a + b (CUDA)");
}
"""

square_plus = load_inline(
    name="square_plus_ext",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    verbose=True,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, a, b):
        return square_plus.square_plus(a, b)
'''

IN_THE_CUDA_SOURCE = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void row_max_kernel(const float* x, float* out, int cols) {
    __shared__ float cache[256];
    float m = -INFINITY;
    for (int c = threadIdx.x; c < cols; c += blockDim.x) m = fmaxf(m, x[(size_t)blockIdx.x * cols + c]);
    cache[threadIdx.x] = m;
    __syncthreads();
    for (int s = 128; s > 0; s >>= 1) {
        if (threadIdx.x < s) cache[threadIdx.x] = fmaxf(cache[threadIdx.x], cache[threadIdx.x + s]);
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = cache[0];
}

torch::Tensor forward(torch::Tensor x) {
    auto out = torch::empty({x.size(0)}, x.options());
    row_max_kernel<<<x.size(0), 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.size(1));
    return out;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("forward", &forward, "Maximum of every row (CUDA)");
}
"""

cpp_source = ""

row_max = load_inline(name="row_max_pybind", cpp_sources=cpp_source, cuda_sources=cuda_source, verbose=False)


class ModelNew(nn.Module):
    def forward(self, x):
        return row_max.forward(x.contiguous())
'''

WITH_KEYWORDS = r"""
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = '''
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>

__global__ void elu_kernel(const float* x, float* y, float alpha, float scale, int64_t n) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < n) y[i] = scale * (x[i] > 0.f ? x[i] : alpha * expm1f(x[i]));
}

torch::Tensor elu(const torch::Tensor& x, double alpha, double scale) {
  auto xc = x.contiguous();
  auto y = torch::empty_like(xc);
  const int64_t n = xc.numel();
  elu_kernel<<<(n + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
      xc.data_ptr<float>(), y.data_ptr<float>(), alpha, scale, n);
  return y;
}
'''

cpp_source = '''
#include <torch/extension.h>
namespace py = pybind11;

torch::Tensor elu(const torch::Tensor& x, double alpha, double scale);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "Scaled exponential linear unit";
  m.def("elu", &elu, py::arg("x"), py::arg("alpha") = 1.0, py::arg("scale") = 1.0);
}
'''

elu_module = load_inline(name='elu_keywords', cpp_sources=[cpp_source], cuda_sources=[cuda_source], extra_cflags=['-O3'])


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return elu_module.elu(x, alpha=1.6732632423543772, scale=1.0507009873554805)
"""

LAMBDA_AND_CLASS = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void scale_rows(const float* x, const float* s, float* y, int rows, int cols) {
    int c = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y;
    if (c < cols) y[r * cols + c] = x[r * cols + c] * s[r];
}

void scale_rows_launcher(const float* x, const float* s, float* y, int rows, int cols) {
    scale_rows<<<dim3((cols + 255) / 256, rows), 256>>>(x, s, y, rows, cols);
}
"""

cpp_source = """
#include <torch/extension.h>

void scale_rows_launcher(const float* x, const float* s, float* y, int rows, int cols);

struct RowScaler {
    explicit RowScaler(bool squared) : squared(squared) {}
    torch::Tensor operator()(torch::Tensor x, torch::Tensor s) const {
        if (squared) s = s * s;
        auto y = torch::empty_like(x);
        scale_rows_launcher(x.data_ptr<float>(), s.data_ptr<float>(), y.data_ptr<float>(), x.size(0), x.size(1));
        return y;
    }
    bool squared;
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    pybind11::class_<RowScaler>(m, "RowScaler").def(pybind11::init<bool>()).def("__call__", &RowScaler::operator());
    m.def("is_float", [](const torch::Tensor& t) { return t.scalar_type() == torch::kFloat32; });
}
"""

rows = load_inline(
    name="row_scaler",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    with_cuda=True,
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaler = rows.RowScaler(True)

    def forward(self, x, s):
        assert rows.is_float(x)
        return self.scaler(x.contiguous(), s.contiguous())
'''

CASES = [
    CorpusCase(
        name="pybind_in_the_cpp_source",
        task=stateless_task("a ** 2 + b", "torch.randn(601, 900), torch.randn(601, 900)", "a, b"),
        candidate=IN_THE_CPP_SOURCE,
        features=("pybind", "elementwise", "checks"),
    ),
    CorpusCase(
        name="pybind_in_the_cuda_source",
        task=stateless_task("torch.amax(x, dim=1)", "torch.randn(1200, 801)"),
        candidate=IN_THE_CUDA_SOURCE,
        features=("pybind", "pybind_in_cuda", "reduction", "shared"),
    ),
    CorpusCase(
        name="pybind_with_keywords",
        task=stateless_task("F.selu(x)", "torch.randn(703, 1001)"),
        candidate=WITH_KEYWORDS,
        features=("pybind", "keyword_arguments", "elementwise", "stream", "double_parameter"),
    ),
    CorpusCase(
        name="pybind_class_and_lambda",
        task=stateless_task("x * (s * s)[:, None]", "torch.randn(700, 1100), torch.rand(700)", "x, s"),
        candidate=LAMBDA_AND_CLASS,
        features=("pybind", "pybind_class", "raw_pointers", "operators_of_tensor"),
    ),
]
