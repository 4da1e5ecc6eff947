import torch
import triton
import triton.language as tl


@triton.autotune(
    configs=[triton.Config({"BLOCK": 1024}, num_warps=4), triton.Config({"BLOCK": 2048}, num_warps=8)],
    key=["n"],
)
@triton.jit
def chain_kernel(x_ptr, scale_ptr, bias_ptr, out_ptr, n, width, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    scale = tl.load(scale_ptr + offsets % width, mask=mask)
    bias = tl.load(bias_ptr + offsets % width, mask=mask)
    gate = 1.0 / (1.0 + tl.exp(-(x * scale + bias)))
    tl.store(out_ptr + offsets, gate * x + 0.5 * x, mask=mask)


class ModelNew(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(width))
        self.bias = torch.nn.Parameter(torch.randn(width))

    def forward(self, x):
        out = torch.empty_like(x)
        n = x.numel()

        def grid(meta):
            return (triton.cdiv(n, meta["BLOCK"]),)

        chain_kernel[grid](x, self.scale, self.bias, out, n, x.shape[1])
        return out
