import torch
import triton
import triton.language as tl


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, n, SIDE: tl.constexpr, DEPTH: tl.constexpr):
    rows = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    columns = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for start in range(0, n, DEPTH):
        inner = start + tl.arange(0, DEPTH)
        a = tl.load(a_ptr + rows[:, None] * n + inner[None, :])
        b = tl.load(b_ptr + inner[:, None] * n + columns[None, :])
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(out_ptr + rows[:, None] * n + columns[None, :], tl.maximum(total, 0.0))


class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        n = a.shape[0]
        out = torch.empty_like(a)
        product_kernel[(n // 64, n // 64)](a, b, out, n, SIDE=64, DEPTH=32)
        return out
