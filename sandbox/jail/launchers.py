"""Triton's launchers inside a runner: asked of the oracle, as extensions are.

Triton compiles a small C library for each signature of a kernel, a fifth of a second of gcc in every process. Its source
depends on nothing else, so the oracle keeps what a compile jail has made of it (`sandbox.build.launcher`), and a signature that
any candidate has used before costs nothing. Where the oracle refuses, Triton compiles as it always does.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from sandbox.jail.extensions import Conversation

LAUNCHER = "__triton_launcher"
"""Triton's name for such a library."""


def install(conversation: Conversation) -> None:
    """Has Triton's launchers built by the oracle, where the process was forked with Triton's compiler loaded."""
    build = sys.modules.get("triton.runtime.build")
    if build is None:
        return
    compile_here = build._build

    def served(name: str, src: str, srcdir: str, *rest: Any) -> str:
        library = _asked_for(conversation, Path(src), Path(srcdir)) if name == LAUNCHER else None
        return library or compile_here(name, src, srcdir, *rest)

    build._build = served


def _asked_for(conversation: Conversation, source: Path, directory: Path) -> str | None:
    """The path of a copy of the library; None where there is none to be had."""
    try:
        answer = conversation.request("launcher", source=source.read_text())
    except RuntimeError:  # between orders nothing is asked for
        return None
    if "error" in answer.header or not answer.fds:
        return None
    path = directory / f"{LAUNCHER}.so"
    with os.fdopen(answer.fds[0], "rb") as library, open(path, "wb") as file:
        library.seek(0)  # its writer's position is ours
        shutil.copyfileobj(library, file)
    return str(path)
