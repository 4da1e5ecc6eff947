"""A runner under a profiler that starts it: what runs in the jail before and after Nsight Compute's `ncu`.

    python -m sandbox.jail.counted profiler PROGRAM ARGUMENT ... NONCE

makes two folders in the private directory, "work" for everybody and "kept" for the profiler's report, and becomes PROGRAM, in whose
arguments `{kept}` stands for the latter. What that is to start is

    python -m sandbox.jail.counted runner NONCE

which takes its standard input as the channel of a runner (`sandbox.jail.runner`). Before it serves any order, and so before there is any
code of a candidate's, it lets go of what the profiler prints on, and enters a Landlock domain of its own: from there it can neither write
in "kept" nor reach the profiler's descriptors and memory through /proc, although both have the same user. The profiler's library in the
runner's own process is not out of reach of native code there; what is counted is advice, not evidence.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Sequence

from sandbox.jail import landlock

KEPT, WORK = "kept", "work"
LOWEST_FD = 16


def command(program: str, arguments: Sequence[str]) -> list[str]:
    """What a jail is to execute: `program` with `arguments`, which starts a runner; a nonce is to be put behind it."""
    own = [sys.executable, "-P", "-m", "sandbox.jail.counted"]
    return [*own, "profiler", program, *arguments, *own, "runner"]


def main(arguments: Sequence[str]) -> None:
    """Carries out one of the two commands."""
    role, *rest = arguments
    if role == "profiler":
        _become_profiler(rest)
    else:
        _serve(rest[0])


def _become_profiler(arguments: Sequence[str]) -> None:
    private = os.getcwd()
    kept, work = (os.path.join(private, name) for name in (KEPT, WORK))
    for folder in (kept, work):
        os.mkdir(folder, 0o700)
    os.chdir(work)
    os.environ.update(HOME=kept, TMPDIR=work, USER="user", LOGNAME="user")
    os.execv(arguments[0], [argument.replace("{kept}", kept) for argument in arguments])


def _serve(nonce: str) -> None:
    channel = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, LOWEST_FD)
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(silence, fd)
    os.close(silence)
    work = os.getcwd()
    os.environ.update(HOME=work, TMPDIR=work)
    os.environ.pop("PYTHONPATH", None)
    tempfile.tempdir = None
    from sandbox.jail import runner  # imports PyTorch, which the other command has no use for

    if landlock.abi():
        landlock.restrict(["/"], [work, "/dev", "/proc"], tcp=True, scoped=False)
    runner.main(channel, nonce, file_fds=())


if __name__ == "__main__":
    main(sys.argv[1:])
