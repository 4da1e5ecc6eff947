"""What the GPU cases share: a Triton addition, and modules for tasks of two tensors."""

HEAD = """
import torch
import triton
import triton.language as tl

@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n) + tl.load(y_ptr + i, mask=i < n), mask=i < n)

def add(x, y, out=None, block=1024):
    out = torch.empty_like(x) if out is None else out
    add_kernel[(triton.cdiv(x.numel(), block),)](x, y, out, x.numel(), BLOCK=block)
    return out
"""


def forward(code: str, before: str = "") -> str:
    """A module whose forward(x, y) runs `code`, behind `before`."""
    lines = "\n".join(f"        {line}" for line in code.strip().splitlines())
    return f"{before}\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x, y):\n{lines}\n"
