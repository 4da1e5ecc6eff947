"""What the NVIDIA driver tells of a GPU without a CUDA context: names, capability, memory by process.

The broker and the oracle ask here. Neither may initialise CUDA: they outlive candidates, and processes forked
from an initialised one are broken. Talks to libnvidia-ml through ctypes, so it needs no package.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass


class NvmlError(RuntimeError):
    """The NVIDIA management library is missing or refused a call; the text says which and with what."""


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _ProcessInfo(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as the driver describes it."""

    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int
    driver: str

    @property
    def arch(self) -> str:
        """The compiler's name of the architecture, such as `sm_90`."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


_lock = threading.Lock()
_library: ctypes.CDLL | None = None

_NOT_AVAILABLE = (1 << 64) - 1
_INSUFFICIENT_SIZE = 7


def _nvml() -> ctypes.CDLL:
    global _library
    with _lock:
        if _library is None:
            try:
                library = ctypes.CDLL("libnvidia-ml.so.1")
            except OSError as error:
                raise NvmlError(f"no NVIDIA driver on this machine: {error}") from error
            status = library.nvmlInit_v2()
            if status != 0:
                raise NvmlError(f"nvmlInit failed with status {status}: is the driver running?")
            _library = library
    return _library


def _call(name: str, *args) -> None:
    status = getattr(_nvml(), name)(*args)
    if status != 0:
        raise NvmlError(f"{name} failed with status {status}")


def _handle(index: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    return handle


def gpu(index: int) -> Gpu:
    """Describes one GPU.

    Args:
        index: The driver's number of the GPU (the order of `nvidia-smi`, not of CUDA_VISIBLE_DEVICES).

    Raises:
        NvmlError: If there is no driver or no such GPU.
    """
    handle = _handle(index)
    name, driver = ctypes.create_string_buffer(96), ctypes.create_string_buffer(80)
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), _Memory()
    _call("nvmlDeviceGetName", handle, name, ctypes.c_uint(96))
    _call("nvmlSystemGetDriverVersion", driver, ctypes.c_uint(80))
    _call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    _call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    return Gpu(
        index=index,
        name=name.value.decode(errors="replace"),
        capability=(major.value, minor.value),
        total_bytes=memory.total,
        driver=driver.value.decode(errors="replace"),
    )


def gpus() -> tuple[Gpu, ...]:
    """All GPUs of this machine; empty where there is no driver."""
    count = ctypes.c_uint()
    try:
        _call("nvmlDeviceGetCount_v2", ctypes.byref(count))
    except NvmlError:
        return ()
    return tuple(gpu(index) for index in range(count.value))


def free_bytes(index: int) -> int:
    """Device memory that no process holds, in bytes. Raises NvmlError."""
    memory = _Memory()
    _call("nvmlDeviceGetMemoryInfo", _handle(index), ctypes.byref(memory))
    return memory.free


def memory_by_process(index: int) -> dict[int, int]:
    """Device memory in bytes of each process that has a context on the GPU, by the pid that this process
    sees.

    A process whose figure the driver keeps to itself (other containers) is left out.
    """
    handle = _handle(index)
    size = 64
    while True:
        infos, count = (_ProcessInfo * size)(), ctypes.c_uint(size)
        status = _nvml().nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), infos)
        if status == 0:
            return {i.pid: i.used_bytes for i in infos[: count.value] if i.used_bytes != _NOT_AVAILABLE}
        if status != _INSUFFICIENT_SIZE:
            raise NvmlError(f"nvmlDeviceGetComputeRunningProcesses_v3 failed with status {status}")
        size = max(size * 2, count.value + 8)


def process_bytes(index: int, pid: int) -> int | None:
    """Device memory of one process in bytes, or None if the driver lists no context of it (or no figure)."""
    return memory_by_process(index).get(pid)
