import torch
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    start = tl.program_id(0) * width
    x = tl.load(x_ptr + start + columns, mask=mask, other=-float("inf"))
    x = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + start + columns, x / tl.sum(x, axis=0), mask=mask)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        out = torch.empty_like(x)
        block = triton.next_power_of_2(x.shape[1])
        softmax_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=block, num_warps=8)
        return out
