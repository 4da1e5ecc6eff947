"""What is taken as given when a package's text is made self-contained: the machine, and the package's own registries and wrappers.

Packages ask at run time what they run on and choose code, sizes and configurations by the answer. Extracted kernels are for one target,
an NVIDIA GPU of compute capability 9.0 with Triton 3.6, on tensors of float32, so these questions have the answers below. The rest of
this module names what a package's decorators and registries are for, as far as that has to be known; none of it is about one kernel.
"""

from __future__ import annotations

import dataclasses
import math

CAPABILITY = (9, 0)
MULTIPROCESSORS = 132
SHARED_BYTES = 232_448
"""Of an H100 or H200 (NVIDIA's data sheet and the CUDA programming guide's table of compute capabilities)."""
TRITON_VERSION, TORCH_VERSION = "3.6.0", "2.11.0"


@dataclasses.dataclass(frozen=True)
class Dotted:
    """Something outside of the package, by its dotted name."""

    name: str


@dataclasses.dataclass(frozen=True)
class Properties:
    """An object with known attributes."""

    fields: tuple[tuple[str, object], ...]


_DRIVER = "triton.runtime.driver.active"
CALLS: dict[str, object] = {
    "torch.cuda.is_available": True,
    "torch.cuda.device_count": 1,
    "torch.cuda.current_device": 0,
    "torch.cuda.get_device_capability": CAPABILITY,
    "torch.cuda.get_device_name": "NVIDIA H200",
    "torch.cuda.get_device_properties": Properties(
        (("multi_processor_count", MULTIPROCESSORS), ("major", CAPABILITY[0]), ("minor", CAPABILITY[1]), ("name", "NVIDIA H200"))
    ),
    "torch.xpu.is_available": False,
    f"{_DRIVER}.get_current_target": Properties((("backend", "cuda"), ("arch", 90), ("warp_size", 32))),
    f"{_DRIVER}.get_current_device": 0,
    f"{_DRIVER}.utils.get_device_properties": {
        "multiprocessor_count": MULTIPROCESSORS,
        "max_shared_mem": SHARED_BYTES,
        "warpSize": 32,
        "max_num_regs": 65_536,
    },
    "platform.machine": "x86_64",
    "check_shared_mem": True,
    "get_sm_count": MULTIPROCESSORS,
}
"""What a call of this dotted name answers, whatever its arguments; without a dot: of every function of a package that is called so."""

VALUES: dict[str, object] = {
    "triton.__version__": TRITON_VERSION,
    "torch.__version__": TORCH_VERSION,
    "torch.version.hip": None,
    "torch.version.cuda": "12.8",
    "sys.platform": "linux",
    "math.pi": math.pi,
    "math.e": math.e,
    "torch_device_fn": Dotted("torch.cuda"),
    "tl_extra_shim": Dotted("triton.language.extra.libdevice"),
}
"""Values by dotted name; without a dot: of every name of a package that is called so, a shim over backends."""

DEVICE_NAMES = {"type": "cuda", "is_cuda": True, "is_cpu": False, "is_npu": False, "is_xpu": False}
"""Attributes of a tensor or of its device."""

PLATFORM_OBJECTS = {"flag_gems.runtime": {"device": Properties((("name", "cuda"), ("vendor_name", "nvidia")))}}
"""Objects of a package that stand for the machine, by module."""

NARROW_TYPES = ("bfloat16", "float16", "float8e4nv", "float8e5", "float8_e4m3fn", "float8_e5m2", "float64")
"""Types that tensors of these tasks never have."""

STANDS_FOR = {"get_dtype_max": "float('inf')", "get_dtype_min": "float('-inf')"}
"""What a call of a package's function comes to for tensors of float32; the functions look into the type in a way that Triton's
interpreter does not offer."""

DROPPED_DECORATORS = frozenset(
    (
        "libentry input_guard contiguous ensure_contiguous lru_cache cache tensor_cache dispatch checkpoint disable compile deprecate_kwarg no_grad "
        "inference_mode staticmethod autocast_custom_fwd autocast_custom_bwd amp_custom_fwd amp_custom_bwd custom_fwd custom_bwd once_differentiable"
    ).split()
)
"""Decorators, by the last part of their name, that change when or how fast a function runs and on which tensors, but not what it computes
on contiguous tensors of one device without autograd."""

CONTEXTS = frozenset("device device_of device_context custom_device_ctx torch_device_fn no_grad inference_mode autocast".split())
"""Context managers that choose the device or switch autograd off."""

TALKATIVE = frozenset("logger logging warnings log print".split())
"""What statements are called on that only tell somebody something."""

TUNERS = frozenset({"autotune", "libtuner", "fla_cache_autotune"})
"""Decorators that choose among configurations by measuring them."""

TUNED, HEURISTICS = "get_tuned_config", "get_heuristic_config"
LOOKUPS = frozenset({TUNED, HEURISTICS})
"""Functions that look configurations or heuristics up by name, in files of the package: flag_gems has `tune_configs.yaml` and a dictionary
`HEURISTICS_CONFIGS`, one of each for every vendor."""

LIBDEVICE = ("triton.language.extra.libdevice.", "triton.language.extra.cuda.libdevice.", "triton.language.math.", "triton.language.libdevice.")
LIKE_LIBDEVICE = "use_tl_extra"
"""Decorator of a function whose body only stands in where CUDA's device library has none of that name."""
