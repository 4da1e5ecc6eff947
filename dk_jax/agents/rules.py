"""What a candidate must look like, for each language and form that the sandbox judges."""

from __future__ import annotations

from dk_jax.agents.text import TaskView, fenced

_MODULE = """\
Write Python source that defines `class ModelNew(torch.nn.Module)` with the constructor arguments and the
`forward` of `Model`, and parameters of the same names and shapes created in the same order, so that both get
equal weights.
"""
_FUSE = """
- In `forward`, PyTorch may allocate outputs (`torch.empty_like`) and change views; it must not compute.
- Fuse neighbouring operations into one kernel and read each value from memory once."""
_RULES = {
    ("triton", "module"): _MODULE
    + """\
- Compute in your own Triton kernels: functions under `@triton.jit`, launched as `kernel[grid](...)`.
- Import what you use: `import torch`, `import triton`, `import triton.language as tl`.
- Mask every load and store whose block may pass the end of a tensor; block sizes are powers of two
  (`tl.constexpr`)."""
    + _FUSE,
    ("cuda", "module"): _MODULE
    + """\
- Compute in your own CUDA kernels, compiled at module level by `torch.utils.cpp_extension.load_inline`
  (`cuda_sources`, `cpp_sources`, `functions`) and called from `forward`.
- Launch on the current stream and guard every index against the end of a tensor."""
    + _FUSE,
    ("cpp", "module"): _MODULE
    + """\
- Compute in your own C++, compiled at module level by `torch.utils.cpp_extension.load_inline`
  (`cpp_sources`, `functions`) and called from `forward`. It runs on the CPU.
- Use OpenMP threads for large tensors and loops that the compiler can vectorise."""
    + _FUSE,
    ("cpp", "kernel"): """\
Write one C++ function for the CPU and nothing around it:

{signature}

- Arguments: `forward`'s, then the model's parameters and buffers, then the output; all contiguous.
- For each tensor NAME the constants `NAME_n` (elements) and `NAME_d0`, `NAME_d1`, ... (sizes) are defined.
- math.h, stddef.h, stdint.h and omp.h are included; the flags are -O2 -march=native -fopenmp -ffast-math.
- Write every element of the output. Fuse neighbouring operations into one pass, use threads for large tensors
  and `#pragma omp simd` where a loop should vectorise.""",
}
_ANY_SIGNATURE = 'extern "C" void kernel(const float* <each input and parameter>, float* out)'


def rules(task: TaskView) -> str:
    """The rules for a candidate of this task.

    Raises ValueError for a language and form that nobody judges.
    """
    text = _RULES.get((task.language, task.form))
    if text is None:
        known = ", ".join(f"{language} {form}" for language, form in _RULES)
        raise ValueError(f"no rules for language {task.language!r} in form {task.form!r}; there are: {known}")
    return text.replace("{signature}", fenced(task.signature or _ANY_SIGNATURE, "cpp"))
