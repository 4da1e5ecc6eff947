"""What the scripts share that take a recipe, work in a folder and have candidates judged. Imports no JAX: scripts set its environment first."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app, flags
from ml_collections import ConfigDict


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Flags, or lines that say which flag is wrong and status 2; config_flags itself raises bare KeyErrors for unknown keys."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        message = str(error)
    except (KeyError, AttributeError) as error:
        message = f"the recipe has no key {error.args[0] if error.args else error}"
    except (TypeError, ValueError, OSError, SyntaxError) as error:
        message = str(error)
    named = set(re.findall(r"\w+", message.split("Did you mean")[0]))
    wrong = next((a for a in argv[1:] if a.startswith("--config.") and a.split("=")[0].split(".")[-1] in named), "")
    print(f"error: {wrong + ': ' if wrong else ''}{message}\nSee the recipe's file for its keys, and --help.", file=sys.stderr)
    sys.exit(2)


def interrupt_on_signals() -> None:
    """Has SIGTERM end the work as Ctrl-C does, which is also heard where a shell started it in the background with SIGINT ignored."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)


def _interrupt(signum, frame):
    raise KeyboardInterrupt


def carried_out(work: Callable[[], int], *more: type[BaseException]) -> int:
    """Does the work of a command, which may be interrupted; its exit status.

    What a user can do something about, `more` among it, is told in a line, with status 1; an interrupt gives status 130.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True)
    interrupt_on_signals()
    try:
        return work()
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on where it stopped", file=sys.stderr, flush=True)
        return 130
    except (*_expected_errors(), *more) as error:
        print(f"\nerror: {error}", file=sys.stderr, flush=True)
        return 1


def _expected_errors() -> tuple[type[BaseException], ...]:
    from dk_jax.interop.endpoint import EndpointError
    from dk_jax.rollout.supervise import SandboxStartError
    from dk_jax.skills.library import LibraryError
    from sandbox.client import SandboxBusy, SandboxRejected, SandboxUnavailable

    return (EndpointError, LibraryError, SandboxStartError, SandboxBusy, SandboxRejected, SandboxUnavailable, OSError, ValueError)


def loaded_recipe(flag: flags.FlagHolder[ConfigDict]) -> ConfigDict:
    """The recipe of a --config flag. Raises UsageError for one that could not be loaded, which says so at its first use."""
    recipe = flag.value
    try:
        recipe.seed  # noqa: B018
    except OSError as error:
        raise app.UsageError(str(error).replace("\n", " ")) from None
    return recipe


def take_folder(workdir: Path, stack: contextlib.ExitStack) -> None:
    """Keeps other processes out of the folder until the stack is closed. Raises ValueError if one is in it."""
    lock = stack.enter_context(open(workdir / ".lock", "w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"another process is using {workdir}: wait for it, or choose another --workdir") from None


def check_socket(socket: str) -> None:
    """Raises FileNotFoundError for a --sandbox that is not there."""
    if not Path(socket).is_socket():
        raise FileNotFoundError(
            f"--sandbox={socket}: no socket is there. Start one with python -m sandbox serve --socket {socket}, or leave the flag out"
        )


def sandbox_socket(cfg: ConfigDict, workdir: Path, given: str, stack: contextlib.ExitStack) -> str:
    """That of the sandbox which --sandbox names, or of one of the recipe's that is started, and ended with the stack."""
    from dk_jax.rollout.supervise import SandboxProcess

    if given:
        check_socket(given)
        return given
    log_path = workdir / "sandbox.log"
    print(f"starting the sandbox (log: {log_path})", flush=True)
    s = cfg.sandbox
    arguments = [
        "--device", s.device, "--workers", str(s.workers), "--threads", str(s.threads), "--cache", str((workdir / "sandbox_cache").absolute()),
        *(["--isolation", s.isolation] if s.isolation else []),
    ]  # fmt: skip
    return stack.enter_context(SandboxProcess(arguments, log_path=log_path)).socket
