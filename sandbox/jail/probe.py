"""Which isolation level this host offers, found by entering a jail of each, and what the levels lack here.

`offered` runs this file as a program of its own, once a process, so that the asking process (a broker without
torch, with threads) changes in nothing.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import sandbox
from sandbox.jail import confine, landlock
from sandbox.jail.limits import Limits
from sandbox.jail.plan import LEVELS, Host, JailSetupError, Level, Plan

TRY_S = 120.0
CHECK = """
import ctypes, os, socket
open('written', 'w').write('x')
status = open('/proc/self/status').read()
assert 'NoNewPrivs:\\t1' in status
assert os.read(os.open('/dev/urandom', os.O_RDONLY), 1)
print(os.getuid(), 'CapEff:\\t0000000000000000' in status)
"""

CUDA_CHECK = """
import ctypes
cuda = ctypes.CDLL('libcuda.so.1')
def must(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    assert code == 0, f'{name} answers {code}'
must('cuInit', 0)
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
must('cuDeviceGet', ctypes.byref(device), 0)
must('cuDevicePrimaryCtxRetain', ctypes.byref(context), device)
must('cuCtxSetCurrent', context)
must('cuMemAlloc_v2', ctypes.byref(memory), ctypes.c_size_t(1 << 20))
"""
GPU_MEMORY_BYTES = 8 << 30


class IsolationError(RuntimeError):
    """A level that this host does not offer was asked for; the text names what is missing."""


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """A level, what it consists of on this host, and what a stricter one would add."""

    name: Level
    features: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What trying found.

    Attributes:
      problems: by level, the reason why it cannot be had; "" where it can.
      own_user: by level, whether the jail ran as a user that nobody else has.
      capable: by level, whether it kept a capability.
      no_cgroups: why there are no control groups; "" where there are.
      landlock_missing: what this kernel's Landlock cannot do yet.
    """

    problems: dict[str, str]
    own_user: dict[str, bool]
    capable: dict[str, bool]
    no_cgroups: str
    landlock_missing: tuple[str, ...]

    @property
    def best(self) -> Level:
        """The strictest level that works, or "none", which `choose` takes only when it is asked for."""
        return next((level for level in LEVELS if not self.problems[level]), "none")


@functools.cache
def offered() -> Offer:
    """Tries every level in a process of its own. Raises IsolationError when not even that can be done."""
    root = str(Path(sandbox.__file__).resolve().parent.parent)
    with tempfile.TemporaryDirectory(prefix="dk_sandbox_probe-") as directory:
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "sandbox.jail.probe", directory],
                cwd=directory,
                env={**os.environ, "PYTHONPATH": root},
                capture_output=True,
                text=True,
                timeout=TRY_S,
                check=True,
            )
            facts = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            text = getattr(error, "stderr", "") or ""
            raise IsolationError(
                f"the isolation of this host cannot be tried: {error} {text[-500:]}"
            ) from error
    return Offer(**{**facts, "landlock_missing": tuple(facts["landlock_missing"])})


def choose(asked: str | None = None) -> Level:
    """The level to run at: the one asked for, or the best.

    Raises:
      IsolationError: this host does not offer `asked`; or nothing was asked for, and only "none" can be had.
    """
    offer = offered()
    if asked is None:
        if offer.best != "none":
            return offer.best
        raise IsolationError(
            f"untrusted code cannot be confined here. strict: {offer.problems['strict']}. "
            f"standard: {offer.problems['standard']}. Use another host or container settings, or accept the "
            "risk with --isolation none"
        )
    if asked not in LEVELS:
        raise IsolationError(f"--isolation {asked}: use {', '.join(LEVELS)}")
    if offer.problems[asked]:
        raise IsolationError(
            f"--isolation {asked} cannot be had here: {offer.problems[asked]}; the best here is {offer.best}"
        )
    return asked


def isolation(level: str | None = None) -> Isolation:
    """What a level (default: the best) consists of here. Raises IsolationError as `choose`."""
    chosen, offer = choose(level), offered()
    features = [
        "process of its own",
        "private directory",
        "rlimits",
        "no_new_privs",
        "death with parent",
        "kill of the whole process tree",
        "memory watch",
        "deadlines",
        "sealed artifacts",
    ]
    missing = []
    if chosen == "none":
        missing += ["seccomp filter", "Landlock rules", "user of its own", "no capabilities"]
    else:
        features += ["seccomp filter", "Landlock rules"]
        if offer.capable[chosen]:
            missing.append("no capabilities (CAP_DAC_READ_SEARCH: Python lies in a closed directory)")
        else:
            features.append("no capabilities")
        (features if offer.own_user[chosen] else missing).append("user of its own")
        missing += [f"Landlock: {name}" for name in offer.landlock_missing]
        if offer.no_cgroups:
            missing.append(f"control groups ({offer.no_cgroups})")
        else:
            features.append("control groups for memory and processes")
    walls = "user, network, IPC, process and mount namespaces"
    if chosen == "strict":
        features += [walls, "file system view of its own", "bounded private directory"]
    else:
        reason = offer.problems["strict"]
        missing.append(f"{walls} ({reason})" if reason else f"{walls} (offered here: --isolation strict)")
        if chosen == "standard" and os.path.exists("/dev/nvidiactl"):
            missing.append("/dev and /proc of their own for runners on a GPU")
    return Isolation(name=chosen, features=tuple(features), missing=tuple(missing))


def _try_all(directory: str) -> Offer:
    os.chmod(directory, 0o711)
    host = Host.find(tempfile.mkdtemp(dir=directory))
    problems, own_user, capable = {}, {}, {}
    for level in LEVELS:
        problems[level], said = _try(level, host, directory, CHECK, Limits(memory_bytes=1 << 30))
        user, powerless = said.split() if not problems[level] else (os.getuid(), "True")
        # Inside its namespace every jail's user has the same number.
        own_user[level] = host.own_users if level == "strict" else int(user) != os.getuid()
        capable[level] = powerless != "True"
    if os.path.exists("/dev/nvidiactl"):
        limits = Limits(memory_bytes=None, open_files=4096, gpu=True)
        without_cuda = {
            level: _try(level, host, directory, CUDA_CHECK, limits)[0] for level in LEVELS if not problems[level]
        }
        if not without_cuda.get("none", "no jail at all"):  # else the GPU itself is out of order, whatever the level
            problems |= {level: f"CUDA: {problem}" for level, problem in without_cuda.items() if problem}
    return Offer(
        problems=problems,
        own_user=own_user,
        capable=capable,
        no_cgroups=host.no_cgroups,
        landlock_missing=tuple(landlock.missing()),
    )


def _try(level: Level, host: Host, directory: str, program: str, limits: Limits) -> tuple[str, str]:
    """Why a jail of a level cannot be entered and run a program, or an empty string; and what was printed in it."""
    memory_bytes = limits.memory_bytes or GPU_MEMORY_BYTES
    private = tempfile.mkdtemp(dir=directory)
    plan = Plan(level=level, directory=private, on_disk=False, limits=limits, memory_bytes=memory_bytes)
    environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    read_end, write_end = os.pipe()

    def run() -> None:
        os.dup2(write_end, 1)
        os.dup2(write_end, 2)
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", program], environment)

    try:
        jail = confine.launch(plan, host, run)
    except JailSetupError as error:
        return str(error), ""
    finally:
        os.close(write_end)
    with os.fdopen(read_end, "rb") as output:
        said = output.read().decode(errors="replace").strip()
    jail.conversation.settimeout(TRY_S / 4)
    end = jail.finish()
    jail.remove()
    if end["code"] or end["signal"]:
        return f"a program does not run in it: {(said.splitlines() or ['it says nothing'])[-1][:300]}", said
    return "", said


if __name__ == "__main__":
    print(json.dumps(asdict(_try_all(sys.argv[1]))))
