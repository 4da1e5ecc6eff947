"""F, continued. Honest C++ modules through `load_inline` on a CPU, in the shapes in which people write them."""

from __future__ import annotations

from sandbox.protocol import Candidate, TaskSpec
from tests.redteam.case import TIMED
from tests.redteam.tasks import LINEAR, NEAR_IDENTITY, ROW_MEAN, SOFTMAX, stateless

BUILT = TIMED.model_copy(update={"build_s": 250, "memory_bytes": 2 << 30})
"""Compilers parse the framework's headers with a gigabyte and more, for half a minute at worst."""
TINY = stateless("honest_tiny", "x * 2.0 + 1.0", "torch.randn(4)")
"""All of its time is that of calling anything at all."""
TRANSPOSED = stateless("honest_transposed", "torch.relu(x.T)", "torch.randn(512, 1024)")

HEAD = '''
import torch
from torch.utils.cpp_extension import load_inline

SOURCE = r"""
{source}
"""
extension = load_inline(name="{name}", cpp_sources=SOURCE, functions={functions!r}, {options})

class ModelNew(torch.nn.Module):
'''
WITH_WEIGHTS = """    def __init__(self, features):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(256, features) / 16)
        self.bias = torch.nn.Parameter(torch.randn(features))
"""
LOOPS = """
static void rows(const float* x, const float* weight, const float* bias, float* out, int64_t from, int64_t to,
                 int64_t depth, int64_t width) {
  for (int64_t i = from; i < to; ++i) {
    float* row = out + i * width;
    for (int64_t j = 0; j < width; ++j) row[j] = bias[j];
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t j = 0; j < width; ++j) row[j] += x[i * depth + k] * weight[k * width + j];
    for (int64_t j = 0; j < width; ++j) row[j] = row[j] > 0 ? row[j] : 0;
  }
}
"""


def extension(
    name: str, source: str, functions: list[str], forward: str, task: TaskSpec = LINEAR, options: str = ""
) -> Candidate:
    """A module for `task` whose forward is the expression `forward` of self, x and extension."""
    options = options or 'extra_cflags=["-O3"]'
    head = HEAD.format(source=source.strip(), name=name, functions=functions, options=options)
    weights = WITH_WEIGHTS if task.name == LINEAR.name else ""
    return Candidate(
        source=f"{head}{weights}    def forward(self, x):\n        return {forward}\n", language="cpp"
    )


CANDIDATES: list[tuple[TaskSpec, Candidate, str]] = []


def _add(name: str, task: TaskSpec, source: str, functions: list[str], forward: str, options: str = "") -> None:
    CANDIDATES.append((task, extension(name, source, functions, forward, task, options), name))


_add(
    "extension_of_one_function",
    LINEAR,
    LOOPS
    + """
torch::Tensor linear_relu(torch::Tensor x, torch::Tensor weight, torch::Tensor bias) {
  TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && weight.is_contiguous(), "wants contiguous matrices");
  auto out = torch::empty({x.size(0), weight.size(1)}, x.options());
  rows(x.data_ptr<float>(), weight.data_ptr<float>(), bias.data_ptr<float>(), out.data_ptr<float>(), 0, x.size(0),
       x.size(1), weight.size(1));
  return out;
}
""",
    ["linear_relu"],
    "extension.linear_relu(x, self.weight, self.bias)",
)
_add(
    "extension_of_two_functions",
    LINEAR,
    """
torch::Tensor product(const torch::Tensor& x, const torch::Tensor& weight) {
  auto out = torch::zeros({x.size(0), weight.size(1)}, x.options());
  auto a = x.accessor<float, 2>(), b = weight.accessor<float, 2>();
  float* to = out.data_ptr<float>();
  const int64_t width = weight.size(1);
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t k = 0; k < x.size(1); ++k) {
      const float scale = a[i][k];
      const float* row = &b[k][0];
      for (int64_t j = 0; j < width; ++j) to[i * width + j] += scale * row[j];
    }
  return out;
}
torch::Tensor add_relu(torch::Tensor x, torch::Tensor bias) {
  float* to = x.data_ptr<float>();
  const float* b = bias.data_ptr<float>();
  const int64_t width = x.size(1);
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = std::max(to[i] + b[i % width], 0.0f);
  return x;
}
""",
    ["product", "add_relu"],
    "extension.add_relu(extension.product(x, self.weight), self.bias)",
)
_add(
    "extension_on_raw_addresses",
    LINEAR,
    LOOPS
    + """
void linear_relu(int64_t x, int64_t weight, int64_t bias, int64_t out, int64_t height, int64_t depth, int64_t width) {
  rows((const float*)x, (const float*)weight, (const float*)bias, (float*)out, 0, height, depth, width);
}
""",
    ["linear_relu"],
    """self.call(x)

    def call(self, x):
        out = x.new_empty(x.shape[0], 256)
        extension.linear_relu(
            x.data_ptr(), self.weight.data_ptr(), self.bias.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], 256
        )
        return out""",
)
_add(
    "extension_with_parallel_for",
    LINEAR,
    LOOPS
    + """
#include <ATen/Parallel.h>
torch::Tensor linear_relu(torch::Tensor x, torch::Tensor weight, torch::Tensor bias) {
  auto out = torch::empty({x.size(0), weight.size(1)}, x.options());
  at::parallel_for(0, x.size(0), 16, [&](int64_t from, int64_t to) {
    rows(x.data_ptr<float>(), weight.data_ptr<float>(), bias.data_ptr<float>(), out.data_ptr<float>(), from, to,
         x.size(1), weight.size(1));
  });
  return out;
}
""",
    ["linear_relu"],
    "extension.linear_relu(x, self.weight, self.bias)",
)
_add(
    "extension_with_openmp",
    LINEAR,
    LOOPS
    + """
torch::Tensor linear_relu(torch::Tensor x, torch::Tensor weight, torch::Tensor bias) {
  auto out = torch::empty({x.size(0), weight.size(1)}, x.options());
  const float *a = x.data_ptr<float>(), *b = weight.data_ptr<float>(), *c = bias.data_ptr<float>();
  float* to = out.data_ptr<float>();
  const int64_t height = x.size(0), depth = x.size(1), width = weight.size(1);
#pragma omp parallel for schedule(dynamic, 16)
  for (int64_t i = 0; i < height; ++i) rows(a, b, c, to, i, i + 1, depth, width);
  return out;
}
""",
    ["linear_relu"],
    "extension.linear_relu(x, self.weight, self.bias)",
    'extra_cflags=["-O3", "-fopenmp"], extra_ldflags=["-fopenmp"]',
)
_add(
    "extension_with_dispatch",
    ROW_MEAN,
    """
template <typename scalar_t>
static void means(const scalar_t* x, scalar_t* out, int64_t height, int64_t width) {
  for (int64_t i = 0; i < height; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < width; ++j) sum += x[i * width + j];
    out[i] = sum / width;
  }
}
torch::Tensor row_mean(torch::Tensor x) {
  x = x.contiguous();
  auto out = torch::empty({x.size(0)}, x.options());
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "row_mean", [&] {
    means<scalar_t>(x.data_ptr<scalar_t>(), out.data_ptr<scalar_t>(), x.size(0), x.size(1));
  });
  return out;
}
""",
    ["row_mean"],
    "extension.row_mean(x)",
)
_add(
    "extension_whose_time_is_the_mathematical_librarys",
    SOFTMAX,
    """
#include <cmath>
torch::Tensor softmax(torch::Tensor x) {
  auto out = torch::empty_like(x);
  const int64_t width = x.size(1);
  for (int64_t i = 0; i < x.size(0); ++i) {
    const float* row = x.data_ptr<float>() + i * width;
    float* to = out.data_ptr<float>() + i * width;
    double sum = 0;
    for (int64_t j = 0; j < width; ++j) sum += to[j] = std::exp((double)row[j]);
    for (int64_t j = 0; j < width; ++j) to[j] /= sum;
  }
  return out;
}
""",
    ["softmax"],
    "extension.softmax(x)",
)
_add(
    "extension_that_copies_by_memcpy",
    NEAR_IDENTITY,
    """
#include <cstring>
torch::Tensor copy(torch::Tensor x) {
  auto out = torch::empty_like(x);
  std::memcpy(out.data_ptr(), x.data_ptr(), x.nbytes());
  return out;
}
""",
    ["copy"],
    "extension.copy(x)",
)
_add(
    "extension_for_a_tiny_task",
    TINY,
    """
torch::Tensor twice_plus_one(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) out.data_ptr<float>()[i] = 2 * x.data_ptr<float>()[i] + 1;
  return out;
}
""",
    ["twice_plus_one"],
    "extension.twice_plus_one(x)",
)
_add(
    "extension_on_a_prepared_input",
    TRANSPOSED,
    """
torch::Tensor relu(torch::Tensor x) {
  x = x.contiguous();
  auto out = torch::zeros_like(x);
  const float* from = x.data_ptr<float>();
  float* to = out.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = from[i] > 0 ? from[i] : 0;
  return out;
}
""",
    ["relu"],
    "extension.relu(x.T)",
)
_add(
    "extension_kept_in_the_constructor",
    LINEAR,
    LOOPS
    + """
torch::Tensor linear_relu(torch::Tensor x, torch::Tensor weight, torch::Tensor bias, torch::Tensor out) {
  rows(x.data_ptr<float>(), weight.data_ptr<float>(), bias.data_ptr<float>(), out.data_ptr<float>(), 0, x.size(0),
       x.size(1), weight.size(1));
  return out.clone();
}
""",
    ["linear_relu"],
    """self.call(x)

    def call(self, x):
        if not hasattr(self, "space"):
            self.space, self.packed = torch.empty(256, 256), self.weight.detach().clone()
        return extension.linear_relu(x, self.packed, self.bias, self.space)""",
)
