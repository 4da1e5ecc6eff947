"""The task, the candidates and the server process that the sandbox's tests share."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest

from sandbox.build import BuildUnavailable
from sandbox.build.toolchain import find_toolchain
from sandbox.client import SandboxClient
from sandbox.protocol import Candidate

ROOT = Path(__file__).resolve().parents[2]

ADD_BIAS = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(features))

    def forward(self, x):
        return torch.relu(x + self.bias)

def get_inputs():
    return [torch.randn(256, 128)]

def get_init_inputs():
    return [128]
"""
SIGNATURE = 'extern "C" void kernel(const float* x, const float* bias, float* out)'
GOOD_BODY = "for (long i = 0; i < out_n; ++i) { float v = x[i] + bias[i % bias_n]; out[i] = v > 0 ? v : 0; }"


def kernel(body: str, before: str = "") -> Candidate:
    """A bare kernel for ADD_BIAS with the given body."""
    return Candidate(source=f"{before}\n{SIGNATURE} {{\n{body}\n}}\n", language="cpp", form="kernel")


def module(source: str, language: str = "cpp") -> Candidate:
    return Candidate(source=source, language=language)


def python_module(body: str, before: str = "") -> Candidate:
    """A module for ADD_BIAS whose forward has the given body (lines indented by 8)."""
    return module(
        f"import torch\nimport torch.nn as nn\n{before}\n"
        "class ModelNew(nn.Module):\n"
        "    def __init__(self, features):\n"
        "        super().__init__()\n"
        "        self.bias = nn.Parameter(torch.randn(features))\n"
        "    def forward(self, x):\n"
        f"{body}\n"
    )


def extensions_problem() -> str:
    """Why no extension can be built here (a compiler and g++ are all that the tests need otherwise); "" if it can."""
    try:
        find_toolchain()
    except BuildUnavailable as error:
        return str(error)
    return ""


needs_extensions = pytest.mark.skipif(bool(extensions_problem()), reason=extensions_problem())


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def command_of(process: psutil.Process | None) -> str:
    """A process's command line; "" for one that has ended meanwhile, reaped or not."""
    try:
        return " ".join(process.cmdline()) if process is not None else ""
    except psutil.NoSuchProcess:  # a zombie too
        return ""


def parent_of(process: psutil.Process) -> psutil.Process | None:
    """Its parent; None where one of the two has ended meanwhile."""
    try:
        return process.parent()
    except psutil.NoSuchProcess:
        return None


def open_descriptors() -> int:
    """Number of this process's descriptors, without those of objects that nobody can reach any more."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """Whether `condition` comes true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


class Server:
    """A server process and a way to talk to it."""

    def __init__(self, process: subprocess.Popen, socket: Path):
        self.process, self.socket = process, socket

    @property
    def pid(self) -> int:
        return self.process.pid

    def client(self, retry_for_s: float = 120.0) -> SandboxClient:
        return SandboxClient(self.socket, retry_for_s=retry_for_s)

    def stop(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(30)


@contextmanager
def running_server(
    directory: Path, *arguments: str, environment: dict[str, str] | None = None, output: IO | None = None
) -> Iterator[Server]:
    """Starts a server, waits until its workers are up, and ends it. `output`: a file for what it writes."""
    socket = directory / "s"
    command = [
        sys.executable,
        "-m",
        "sandbox",
        "serve",
        "--socket",
        str(socket),
        "--device",
        "cpu",
        "--cache",
        str(directory / "cache"),
        "--threads",
        "2",
        *arguments,
    ]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **(environment or {})}, stderr=output)
    server = Server(process, socket)
    try:
        assert eventually(lambda: socket.exists() or process.poll() is not None, 60), "no socket"
        with server.client() as client:
            assert eventually(lambda: client.health().status == "ok", 120), "the server does not get ready"
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
