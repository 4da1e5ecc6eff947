"""What can go wrong with a jailed process, and how it ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass


class JailError(RuntimeError):
    """Base of what can go wrong with a jailed process; the text is fit for a person."""


class JailTimeout(JailError):
    """The process was still busy at its deadline; it has been killed."""


class JailDied(JailError):
    """The process ended, or was ended, before it answered. `exit` says how; `output` is what it printed
    last."""

    def __init__(self, message: str, exit: Exit, output: str = ""):
        super().__init__(message)
        self.exit, self.output = exit, output


class JailMemory(JailError):
    """The process used more memory than allowed; it has been killed."""


class JailReply(JailError):
    """The runner answered with an error of a `kind` (see `sandbox.jail.runner`)."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class ZygoteLost(JailError):
    """The zygote itself has gone: the judge's fault, never the candidate's."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a process ended: exit code, or the signal that killed it; `peak_bytes` is its largest resident
    size, `out_of_memory` whether the kernel killed it or a process of its for exceeding its memory."""

    code: int
    signal: int
    peak_bytes: int
    out_of_memory: bool = False

    def __str__(self) -> str:
        if self.signal:
            try:
                return f"killed by {signal.Signals(self.signal).name}"
            except ValueError:
                return f"killed by signal {self.signal}"
        return f"left with exit code {self.code}"
