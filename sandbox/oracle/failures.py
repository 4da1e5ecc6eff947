"""Whose fault it was: failures of a candidate's process as outcomes with feedback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sandbox.jail.faults import JailDied, JailMemory, JailReply, JailTimeout, ZygoteLost
from sandbox.jail.jailed import Runner
from sandbox.oracle.room import DeviceFull
from sandbox.protocol import Finding, Outcome
from sandbox.verdict import feedback

MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, RuntimeError)
"""What reading a candidate's reply can raise when the candidate has made it up."""


class Cancelled(Exception):
    """The broker no longer wants this evaluation."""


class Failure(Exception):
    """The evaluation ends here with `outcome`."""

    def __init__(self, outcome: Outcome, text: str, finding: Finding | None = None):
        super().__init__(text)
        self.outcome, self.text, self.finding = outcome, text, finding


@contextmanager
def blamed_on_candidate(runner: Runner, doing: str, limit_s: float, memory_bytes: int) -> Iterator[None]:
    """Turns what goes wrong with the candidate's process into a `Failure` with the right outcome.

    Raises:
      DeviceFull: it ran out of memory for which it cannot be blamed.
    """
    try:
        yield
    except ZygoteLost:
        raise
    except JailTimeout as error:
        raise Failure("timeout", f"{doing} the candidate took longer than {limit_s:g} s") from error
    except JailMemory as error:
        raise Failure("out_of_memory", f"{doing} the candidate {error}") from error
    except JailReply as error:
        raise _excused(_reply_failure(error, doing), runner) from error
    except JailDied as error:
        raise _excused(_death_failure(error, doing, memory_bytes), runner) from error


def _excused(failure: Failure, runner: Runner) -> Exception:
    """The failure, or DeviceFull where a jail ran out of memory that others have taken."""
    full = runner.excuse(runner.pid) if failure.outcome == "out_of_memory" and runner.excuse else None
    return DeviceFull(full) if full else failure


def _reply_failure(error: JailReply, doing: str) -> Failure:
    text = str(error)
    if error.kind == "build_failed":
        return Failure("build_failed", feedback.build_failed(text))
    if error.kind == "wrong_output":
        return Failure("incorrect", feedback.failed("wrong result", text))
    if error.kind == "out_of_memory":
        return Failure("out_of_memory", feedback.failed("out of memory", text))
    outcome = "load_failed" if error.kind == "load_failed" else "runtime_error"
    return Failure(outcome, feedback.failed(f"{doing} the candidate failed", text))


def _death_failure(error: JailDied, doing: str, memory_bytes: int) -> Failure:
    end, text = error.exit, str(error)
    memory = end.signal and end.peak_bytes > 0.75 * memory_bytes
    if memory or "bad_alloc" in error.output or "out of memory" in error.output.lower():
        return Failure(
            "out_of_memory", f"{doing} the candidate ran out of memory ({memory_bytes >> 20} MiB allowed)"
        )
    if end.signal == 11:
        text += " (segmentation fault: it reads or writes outside its arrays)"
    elif end.signal == 8:
        text += " (arithmetic error: an integer division by zero)"
    outcome = "load_failed" if doing == "loading" else "runtime_error"
    return Failure(outcome, feedback.failed(f"{doing} the candidate failed: {text}", error.output[-600:]))
