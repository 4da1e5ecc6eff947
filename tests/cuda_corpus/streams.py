"""Host code with streams, events, guards and synchronisation."""

from tests.cuda_corpus.case import CorpusCase, plain_module, stateless_task

POOL_STREAMS = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

__global__ void scaled_tanh(const float* x, float* y, float scale, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = scale * tanhf(x[i]);
}

// Both halves run side by side on streams of PyTorch's pool; the current stream waits for both.
torch::Tensor two_streams(torch::Tensor x, double scale) {
  const at::cuda::CUDAGuard guard(x.device());
  auto input = x.contiguous();
  auto out = torch::empty_like(input);
  const int64_t n = input.numel(), first = n / 2, second = n - first;
  const float* src = input.data_ptr<float>();
  float* dst = out.data_ptr<float>();
  const float s = static_cast<float>(scale);

  auto main = at::cuda::getCurrentCUDAStream();
  auto left = at::cuda::getStreamFromPool(/*isHighPriority=*/false, x.device().index());
  auto right = at::cuda::getStreamFromPool(/*isHighPriority=*/false, x.device().index());
  at::cuda::CUDAEvent ready, left_done, right_done;
  ready.record(main);
  ready.block(left);
  ready.block(right);

  const int threads = 256;
  if (first > 0) scaled_tanh<<<(first + threads - 1) / threads, threads, 0, left>>>(src, dst, s, first);
  scaled_tanh<<<(second + threads - 1) / threads, threads, 0, right>>>(src + first, dst + first, s, second);
  C10_CUDA_KERNEL_LAUNCH_CHECK();

  left_done.record(left);
  right_done.record(right);
  left_done.block(main);
  right_done.block(main);
  return out;
}
"""

cpp_source = "torch::Tensor two_streams(torch::Tensor x, double scale);"

ext = load_inline(
    name="two_pool_streams", cpp_sources=cpp_source, cuda_sources=cuda_source, functions=["two_streams"], with_cuda=True
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return ext.two_streams(x, 1.5)
'''

RAW_EVENTS = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>
#include <stdexcept>
#include <string>

#define CUDA_CHECK(call)                                                                  \
    do {                                                                                  \
        cudaError_t status_ = (call);                                                     \
        if (status_ != cudaSuccess) {                                                     \
            throw std::runtime_error(std::string("CUDA error: ") + cudaGetErrorString(status_)); \
        }                                                                                 \
    } while (0)

template <bool MAXIMUM>
__global__ void extreme_rows(const float* x, float* out, int cols) {
    __shared__ float best[128];
    float b = x[(size_t)blockIdx.x * cols];
    for (int c = threadIdx.x; c < cols; c += 128) {
        float v = x[(size_t)blockIdx.x * cols + c];
        b = MAXIMUM ? fmaxf(b, v) : fminf(b, v);
    }
    best[threadIdx.x] = b;
    __syncthreads();
    for (int s = 64; s > 0; s /= 2) {
        if (threadIdx.x < s) {
            float o = best[threadIdx.x + s];
            best[threadIdx.x] = MAXIMUM ? fmaxf(best[threadIdx.x], o) : fminf(best[threadIdx.x], o);
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = best[0];
}

__global__ void spread(const float* hi, const float* lo, float* out, int rows) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r < rows) out[r] = hi[r] - lo[r];
}

torch::Tensor value_range(torch::Tensor x) {
    static cudaStream_t side = nullptr;
    static cudaEvent_t fork_event, join_event;
    if (side == nullptr) {
        CUDA_CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
        CUDA_CHECK(cudaEventCreateWithFlags(&fork_event, cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&join_event, cudaEventDisableTiming));
    }
    const int rows = x.size(0), cols = x.size(1);
    auto hi = torch::empty({rows}, x.options());
    auto lo = torch::empty({rows}, x.options());
    auto out = torch::empty({rows}, x.options());

    cudaStream_t main = c10::cuda::getCurrentCUDAStream().stream();
    CUDA_CHECK(cudaEventRecord(fork_event, main));
    CUDA_CHECK(cudaStreamWaitEvent(side, fork_event, 0));
    extreme_rows<true><<<rows, 128, 0, main>>>(x.data_ptr<float>(), hi.data_ptr<float>(), cols);
    extreme_rows<false><<<rows, 128, 0, side>>>(x.data_ptr<float>(), lo.data_ptr<float>(), cols);
    CUDA_CHECK(cudaEventRecord(join_event, side));
    CUDA_CHECK(cudaStreamWaitEvent(main, join_event, 0));
    spread<<<(rows + 127) / 128, 128, 0, main>>>(hi.data_ptr<float>(), lo.data_ptr<float>(), out.data_ptr<float>(), rows);
    CUDA_CHECK(cudaGetLastError());
    return out;
}
"""

cpp_source = "torch::Tensor value_range(torch::Tensor x);"

ranges = load_inline(
    name="value_range_streams",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["value_range"],
    verbose=False,
)


class ModelNew(nn.Module):
    def forward(self, x):
        return ranges.value_range(x.contiguous())
'''

SYNCHRONISED = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

softsign_source_note = "one thread per element; waits for the result"

cuda_source = """
#include <torch/extension.h>
#include <cuda_runtime.h>
#include <iostream>

__global__ void softsign_kernel(const float* x, float* y, int n) {
    int i = threadIdx.x + blockIdx.x * blockDim.x;
    if (i < n) y[i] = x[i] / (1.0f + fabsf(x[i]));
}

torch::Tensor softsign(torch::Tensor x) {
    auto y = torch::empty_like(x);
    int n = x.numel();
    softsign_kernel<<<(n + 511) / 512, 512>>>(x.data_ptr<float>(), y.data_ptr<float>(), n);

    cudaError_t err = cudaGetLastError();
    if (err != cudaSuccess) {
        std::cerr << "launch failed: " << cudaGetErrorString(err) << std::endl;
    }
    cudaDeviceSynchronize();
    return y;
}
"""

cpp_source = "torch::Tensor softsign(torch::Tensor x);"

softsign = load_inline(
    name="softsign_sync",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["softsign"],
    verbose=True,
    extra_cflags=["-O2"],
)


class ModelNew(nn.Module):
    def __init__(self):
        super(ModelNew, self).__init__()
        self.softsign = softsign

    def forward(self, x):
        return self.softsign.softsign(x.contiguous())
'''

MEMSET = r'''
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
#include <torch/extension.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/CUDAException.h>

// Each block adds its strip of rows to the result, which cudaMemsetAsync has cleared on the same stream.
__global__ void column_sums_kernel(const float* __restrict__ x, float* __restrict__ sums, int rows, int cols, int strip) {
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= cols) return;
  const int from = blockIdx.y * strip, to = min(rows, from + strip);
  float acc = 0.f;
  for (int r = from; r < to; ++r) acc += x[static_cast<size_t>(r) * cols + c];
  atomicAdd(&sums[c], acc);
}

torch::Tensor column_sums(const torch::Tensor& x) {
  const auto input = x.contiguous();
  const int rows = static_cast<int>(input.size(0)), cols = static_cast<int>(input.size(1));
  auto sums = torch::empty({cols}, input.options());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  C10_CUDA_CHECK(cudaMemsetAsync(sums.data_ptr(), 0, sums.numel() * sums.element_size(), stream));
  constexpr int strip = 32;
  const dim3 grid((cols + 127) / 128, (rows + strip - 1) / strip);
  column_sums_kernel<<<grid, 128, 0, stream>>>(input.const_data_ptr<float>(), sums.mutable_data_ptr<float>(), rows, cols, strip);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return sums;
}
"""

cpp_source = """torch::Tensor column_sums(const torch::Tensor& x);"""

sums = load_inline(name="column_sums_memset", cpp_sources=[cpp_source], cuda_sources=[cuda_source], functions=["column_sums"],
                   extra_cuda_cflags=["-O3", "--use_fast_math"])


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.column_sums = sums.column_sums

    def forward(self, x):
        return self.column_sums(x)
'''

STREAM_GUARD = plain_module(
    name="cubic_on_guarded_stream",
    functions="cubic",
    cuda_source="""
#include <torch/extension.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <ATen/cuda/CUDAEvent.h>

__global__ void cubic_kernel(const float* x, float* y, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    const float v = x[i];
    y[i] = v * (1.f + v * (-0.5f + 0.25f * v));
  }
}

torch::Tensor cubic(torch::Tensor x) {
  auto y = torch::empty_like(x);
  const c10::cuda::CUDAStream outer = c10::cuda::getCurrentCUDAStream();
  const c10::cuda::CUDAStream inner = c10::cuda::getStreamFromPool();
  at::cuda::CUDAEvent before, after;
  before.record(outer);
  before.block(inner);
  {
    // whatever asks for the current stream in here gets the inner one
    c10::cuda::CUDAStreamGuard guard(inner);
    cubic_kernel<<<264, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
    after.record();
  }
  after.block(outer);
  return y;
}
""",
    cpp_source="torch::Tensor cubic(torch::Tensor x);",
    forward="ext.cubic(x.contiguous())",
)

CASES = [
    CorpusCase(
        name="two_streams_of_the_pool",
        task=stateless_task("1.5 * torch.tanh(x)", "torch.randn(801, 1003)"),
        candidate=POOL_STREAMS,
        features=("streams", "side_stream", "event", "cuda_context", "guard", "launch_check", "double_parameter"),
    ),
    CorpusCase(
        name="side_stream_with_raw_events",
        task=stateless_task("torch.amax(x, dim=1) - torch.amin(x, dim=1)", "torch.randn(1500, 611)"),
        candidate=RAW_EVENTS,
        features=("streams", "side_stream", "event", "macros", "std_exception", "static", "template"),
    ),
    CorpusCase(
        name="synchronises_the_device",
        task=stateless_task("F.softsign(x)", "torch.randn(640, 1201)"),
        candidate=SYNCHRONISED,
        features=("device_synchronize", "get_last_error", "iostream", "elementwise"),
    ),
    CorpusCase(
        name="memset_on_the_current_stream",
        task=stateless_task("x.sum(dim=0)", "torch.randn(1003, 805)"),
        candidate=MEMSET,
        features=("stream", "memset", "atomics", "cuda_check", "launch_check", "const_data_ptr", "element_size", "fast_math"),
    ),
    CorpusCase(
        name="stream_guard_and_event",
        task=stateless_task("x - 0.5 * x ** 2 + 0.25 * x ** 3", "torch.randn(700, 1007)"),
        candidate=STREAM_GUARD,
        features=("streams", "side_stream", "event", "stream_guard", "cuda_context", "grid_stride"),
    ),
]
