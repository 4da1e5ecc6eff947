"""`load_inline` and `load` inside a runner: asks the oracle for the library, loads what comes back.

A runner has no compiler. What the candidate wants built goes over the channel in the middle of the order
being carried out; the library returns as a descriptor of sealed memory. The oracle bounds and checks what it
gets (`sandbox.build.extension`); the checks here only make errors early.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sandbox.jail.device import BuildError
from sandbox.jail.frames import Channel, Message

MAX_SOURCE_BYTES = 1 << 20
"""Read here at most; the oracle's limit is lower."""


def _import_without_asking_for_a_gpu() -> Any:
    """`torch.utils.cpp_extension` asks at its import whether a GPU is there, which would start the driver's
    threads in the process that everything is forked from."""
    asked = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        return importlib.import_module("torch.utils.cpp_extension")
    finally:
        torch.cuda.is_available = asked


cpp_extension = _import_without_asking_for_a_gpu()


class Conversation:
    """The runner's end of the channel, shared by the order being carried out and the requests within it.

    Calls and replies alternate, so a request is only possible while an order is being carried out; threads
    take turns.
    """

    def __init__(self, channel: Channel):
        self._channel, self._lock, self._carrying_out = channel, threading.Lock(), False

    def order(self, max_payload_bytes: int) -> Message:
        """Waits for the next order."""
        message = self._channel.receive(max_payload_bytes)
        self._carrying_out = True
        return message

    def reply(self, header: dict[str, Any], buffers: Sequence[memoryview] = ()) -> None:
        """Ends the order."""
        with self._lock:
            self._carrying_out = False
            self._channel.send(header, buffers)

    def request(self, what: str, **details: Any) -> Message:
        """Asks the oracle for something. Raises RuntimeError when it has ordered nothing."""
        with self._lock:
            if not self._carrying_out:
                raise RuntimeError("extensions are built while the module loads, not behind the judge's back")
            self._channel.send({"request": what, **details})
            return self._channel.receive(0)


def _are_names(value: Any) -> bool:
    names = [value] if isinstance(value, str) else list(value or ())
    return bool(names) and all(isinstance(name, str) and name.isidentifier() for name in names)


def install(conversation: Conversation) -> None:
    """Puts served functions in the place of PyTorch's, in this process."""

    def load_inline(
        name,
        cpp_sources,
        cuda_sources=None,
        sycl_sources=None,
        functions=None,
        extra_cflags=None,
        extra_cuda_cflags=None,
        extra_sycl_cflags=None,
        extra_ldflags=None,
        extra_include_paths=None,
        build_directory=None,
        verbose=False,
        with_cuda=None,
        with_sycl=None,
        is_python_module=True,
        with_pytorch_error_handling=True,
        keep_intermediates=True,
        use_pch=False,
        no_implicit_headers=False,
    ):
        if functions is None and _are_names(sycl_sources):
            # Before PyTorch 2.7 the functions stood in this place, and that is how many sources pass them.
            sycl_sources, functions = None, sycl_sources
        if sycl_sources or with_sycl:
            raise BuildError(f"load_inline({name!r}): SYCL is not supported here")
        return _served(
            conversation,
            "load_inline",
            name,
            is_python_module,
            cpp_sources=_plain(cpp_sources),
            cuda_sources=_plain(cuda_sources),
            functions=_plain(functions),
            extra_cflags=_plain(extra_cflags),
            extra_cuda_cflags=_plain(extra_cuda_cflags),
            extra_ldflags=_plain(extra_ldflags),
            extra_include_paths=_plain(extra_include_paths),
            with_cuda=bool(with_cuda),
            with_pytorch_error_handling=bool(with_pytorch_error_handling),
            no_implicit_headers=bool(no_implicit_headers),
        )

    def load(
        name,
        sources,
        extra_cflags=None,
        extra_cuda_cflags=None,
        extra_sycl_cflags=None,
        extra_ldflags=None,
        extra_include_paths=None,
        build_directory=None,
        verbose=False,
        with_cuda=None,
        with_sycl=None,
        is_python_module=True,
        is_standalone=False,
        keep_intermediates=True,
    ):
        if is_standalone or with_sycl:
            raise BuildError(f"load({name!r}): only libraries of C++ and CUDA sources are built here")
        paths = [sources] if isinstance(sources, (str, os.PathLike)) else sources
        return _served(
            conversation,
            "load",
            name,
            is_python_module,
            files=[[os.path.basename(path), _read(path)] for path in map(os.fspath, paths)],
            extra_cflags=_plain(extra_cflags),
            extra_cuda_cflags=_plain(extra_cuda_cflags),
            extra_ldflags=_plain(extra_ldflags),
            extra_include_paths=_plain(extra_include_paths),
            with_cuda=bool(with_cuda),
        )

    for served in (load_inline, load):
        served.__module__, served.__qualname__ = cpp_extension.__name__, served.__name__
        setattr(cpp_extension, served.__name__, served)


def _served(
    conversation: Conversation, function: str, name: Any, is_python_module: bool, **details: Any
) -> Any:
    answer = conversation.request(
        "extension", name=str(name), is_python_module=bool(is_python_module), **details
    )
    failure = answer.header.get("error")
    if failure is not None:
        raise BuildError(f"{function}({str(name)[:100]!r}) failed to build:\n{failure}")
    # Kept open: the loader tells libraries apart by the names of their files.
    path = f"/proc/self/fd/{answer.fds[0]}"
    try:
        if not is_python_module:
            # Not torch.ops.load_library: it follows the link to a name that nothing has.
            ctypes.CDLL(path)
            return path
        module_name = answer.header["module"]
        loader = importlib.machinery.ExtensionFileLoader(module_name, path)
        spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, OSError) as error:
        raise BuildError(
            f"{function}({str(name)[:100]!r}) built a library that does not load: {_told(error)}"
        ) from None
    return module


def _told(error: Exception) -> str:
    """The loader's words, with the missing symbol's name as it stands in the source."""
    before, colon, symbol = str(error).rpartition("undefined symbol: ")
    name = torch._C._demangle(symbol.strip()).replace("sandbox_lean::", "at::")  # see sandbox.build.lean_road
    return f"undefined symbol: {name}" if colon else str(error)


def _plain(value: Any) -> Any:
    """The argument as JSON has it; the oracle says what is wrong with it."""
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, dict):
        return {str(key): str(text) for key, text in value.items()}
    if isinstance(value, list):
        return [item if isinstance(item, str) else str(item) for item in value]
    return value if value is None or isinstance(value, str) else str(value)


def _read(path: str) -> str:
    with open(Path(path), encoding="utf-8", errors="surrogateescape") as file:
        return file.read(MAX_SOURCE_BYTES)
