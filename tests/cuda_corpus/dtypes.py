"""Integers, double precision, and 16-bit types by other ways than the usual dispatch."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

ALL_TYPES = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>

template <typename scalar_t>
__global__ void clamp_affine(const scalar_t* x, scalar_t* y, scalar_t mul, scalar_t add, scalar_t lo, scalar_t hi, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    scalar_t v = x[i] * mul + add;
    if (v < lo) v = lo;
    if (v > hi) v = hi;
    y[i] = v;
}

torch::Tensor clamp_affine_cuda(torch::Tensor x, int64_t mul, int64_t add, int64_t lo, int64_t hi)
{
    TORCH_CHECK(x.is_cuda(), "expected a CUDA tensor");
    auto input = x.contiguous();
    auto y = torch::empty(input.sizes(), input.options());
    int64_t n = input.numel();
    AT_DISPATCH_ALL_TYPES(input.scalar_type(), "clamp_affine_cuda", ([&] {
        clamp_affine<scalar_t><<<(n + 255) / 256, 256>>>(
            input.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(),
            static_cast<scalar_t>(mul), static_cast<scalar_t>(add),
            static_cast<scalar_t>(lo), static_cast<scalar_t>(hi), n);
    }));
    return y;
}
"""

cpp_source = """
torch::Tensor clamp_affine_cuda(torch::Tensor x, int64_t mul, int64_t add, int64_t lo, int64_t hi);
"""

ops = load_inline(
    name="clamp_affine_all_types",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["clamp_affine_cuda"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return ops.clamp_affine_cuda(x, 3, -7, -100, 120)
'''

THROUGH_DOUBLE = plain_module(
    name="polynomial_double",
    functions="polynomial",
    cuda_source="""
#include <torch/extension.h>
#include <vector>

// Horner's rule in double precision; the coefficients come as a list of Python floats.
struct Coefficients {
    double c[8];
    int count;
};

__global__ void horner(const double* x, double* y, Coefficients p, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        double v = 0.0;
        for (int k = p.count - 1; k >= 0; --k) v = fma(v, x[i], p.c[k]);
        y[i] = v;
    }
}

torch::Tensor polynomial(torch::Tensor x, std::vector<double> coefficients) {
    TORCH_CHECK(coefficients.size() <= 8, "at most 8 coefficients, got ", coefficients.size());
    auto wide = x.to(torch::kFloat64).contiguous();
    auto y = torch::empty_like(wide);
    Coefficients p;
    p.count = coefficients.size();
    for (size_t k = 0; k < coefficients.size(); ++k) p.c[k] = coefficients[k];
    const int n = wide.numel();
    horner<<<(n + 255) / 256, 256>>>(wide.data_ptr<double>(), y.data_ptr<double>(), p, n);
    return y.to(x.scalar_type());
}
""",
    cpp_source="torch::Tensor polynomial(torch::Tensor x, std::vector<double> coefficients);",
    forward="ext.polynomial(x, [0.5, -1.25, 0.0, 0.125])",
    options="verbose=False",
)

BF16_ROW_SUM = plain_module(
    name="bf16_pair_sum",
    functions="row_sum_bf16",
    cuda_source="""
#include <torch/extension.h>
#include <cuda_bf16.h>

__global__ void row_sum_kernel(const __nv_bfloat162* x, __nv_bfloat16* out, int pairs) {
  const __nv_bfloat162* row = x + (size_t)blockIdx.x * pairs;
  float sum = 0.f;
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
    const float2 f = __bfloat1622float2(row[i]);
    sum += f.x + f.y;
  }
  __shared__ float part[8];
  for (int o = 16; o; o >>= 1) sum += __shfl_down_sync(0xffffffff, sum, o);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < 8; ++w) sum += part[w];
    out[blockIdx.x] = __float2bfloat16(sum);
  }
}

torch::Tensor row_sum_bf16(torch::Tensor x) {
  TORCH_CHECK(x.dtype() == torch::kBFloat16, "this kernel is for bfloat16");
  TORCH_CHECK(x.size(1) % 2 == 0, "rows must have an even length");
  auto out = torch::empty({x.size(0)}, x.options());
  row_sum_kernel<<<x.size(0), 256>>>(
      reinterpret_cast<const __nv_bfloat162*>(x.data_ptr()), reinterpret_cast<__nv_bfloat16*>(out.data_ptr()), x.size(1) / 2);
  return out;
}
""",
    cpp_source="torch::Tensor row_sum_bf16(torch::Tensor x);",
    forward="ext.row_sum_bf16(x.contiguous())",
)

HALF_THROUGH_FLOAT = plain_module(
    name="layer_norm_opmath",
    functions="layer_norm_half",
    cuda_source="""
#include <torch/extension.h>
#include <ATen/OpMathType.h>

template <typename T, typename acc_t = at::opmath_type<T>>
__global__ void layer_norm_kernel(const T* x, T* y, int d, acc_t eps) {
    __shared__ acc_t mean, inv_std;
    __shared__ acc_t buf[128];
    const T* in = x + static_cast<long>(blockIdx.x) * d;
    acc_t local = 0;
    for (int i = threadIdx.x; i < d; i += 128) local += static_cast<acc_t>(in[i]);
    buf[threadIdx.x] = local;
    __syncthreads();
    if (threadIdx.x == 0) {
        acc_t t = 0;
        for (int i = 0; i < 128; ++i) t += buf[i];
        mean = t / d;
    }
    __syncthreads();
    local = 0;
    for (int i = threadIdx.x; i < d; i += 128) {
        const acc_t diff = static_cast<acc_t>(in[i]) - mean;
        local += diff * diff;
    }
    buf[threadIdx.x] = local;
    __syncthreads();
    if (threadIdx.x == 0) {
        acc_t t = 0;
        for (int i = 0; i < 128; ++i) t += buf[i];
        inv_std = acc_t(1) / sqrt(t / d + eps);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < d; i += 128)
        y[static_cast<long>(blockIdx.x) * d + i] = static_cast<T>((static_cast<acc_t>(in[i]) - mean) * inv_std);
}

torch::Tensor layer_norm_half(torch::Tensor x, double eps) {
    x = x.contiguous();
    auto y = torch::empty_like(x);
    const int d = x.size(-1);
    const int rows = x.numel() / d;
    AT_DISPATCH_SWITCH(x.scalar_type(), "layer_norm_half",
        AT_DISPATCH_CASE(at::ScalarType::Half, [&] {
            layer_norm_kernel<scalar_t><<<rows, 128>>>(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), d, (float)eps);
        })
        AT_DISPATCH_CASE(at::ScalarType::Float, [&] {
            layer_norm_kernel<scalar_t><<<rows, 128>>>(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), d, (float)eps);
        }));
    return y;
}
""",
    cpp_source="torch::Tensor layer_norm_half(torch::Tensor x, double eps);",
    forward="ext.layer_norm_half(x, 1e-5)",
)

CASES = [
    CorpusCase(
        name="integers_by_dispatch_all_types",
        task=stateless_task("torch.clamp(x * 3 - 7, -100, 120)", "torch.randint(-60, 60, (700, 501))"),
        candidate=ALL_TYPES,
        features=("integers", "dispatch_all_types", "int64_parameter", "int64_output", "checks"),
    ),
    CorpusCase(
        name="polynomial_in_double",
        task=stateless_task("0.5 - 1.25 * x + 0.125 * x ** 3", "torch.randn(501, 999)"),
        candidate=THROUGH_DOUBLE,
        features=("double", "to_dtype", "vector_parameter", "struct", "checks"),
    ),
    CorpusCase(
        name="row_sum_of_bfloat16_pairs",
        task=stateless_task("x.sum(dim=1)", "torch.rand(900, 1022)"),
        candidate=BF16_ROW_SUM,
        dtype="bfloat16",
        features=("bfloat16", "reduction", "vectorised", "reinterpret_cast", "untyped_pointer", "warp", "checks"),
    ),
    CorpusCase(
        name="layer_norm_of_half_by_opmath",
        task=stateless_task("F.layer_norm(x, (600,))", "torch.randn(5, 200, 600)"),
        candidate=HALF_THROUGH_FLOAT,
        dtype="float16",
        features=("half", "norm", "dispatch_switch", "opmath", "template", "shared"),
    ),
]
