import torch
from torch.utils.cpp_extension import load_inline

cuda_source = """
template <typename T>
__global__ void add_kernel(const T* x, const T* y, T* out, long n) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + y[i];
}

torch::Tensor add(torch::Tensor x, torch::Tensor y) {
    auto out = torch::empty_like(x);
    long n = x.numel();
    add_kernel<float><<<(n + 255) / 256, 256>>>(
        x.data_ptr<float>(), y.data_ptr<float>(), out.data_ptr<float>(), n);
    return out;
}
"""

extension = load_inline(
    name="vector_add",
    cpp_sources="torch::Tensor add(torch::Tensor x, torch::Tensor y);",
    cuda_sources=cuda_source,
    functions=["add"],
)


class ModelNew(torch.nn.Module):
    def forward(self, x, y):
        return extension.add(x, y)
