"""What a run says beyond its results: all of it in WORKDIR/run.log, and on the console, once each, what it has found out and decided about
the machine before its first step (attention by measurement, memory budgets)."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

FILE = "run.log"
DECISIONS = ("dk_jax.generation", "dk_jax.train.model")
"""Loggers whose information is for the console, too."""


class _FirstTime(logging.Filter):
    """Lets information of `DECISIONS` pass, each text once; warnings have a handler of their own."""

    def __init__(self) -> None:
        super().__init__()
        self._told: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.levelno != logging.INFO or not record.name.startswith(DECISIONS) or text in self._told:
            return False
        self._told.add(text)
        return True


@contextlib.contextmanager
def run_log(workdir: Path) -> Iterator[None]:
    """Has this project's loggers write to WORKDIR/run.log (appended to) and, where decisions are told, to standard error.

    Raises:
      OSError: the file can't be written.
    """
    logger = logging.getLogger("dk_jax")
    file, console = logging.FileHandler(workdir / FILE), logging.StreamHandler(sys.stderr)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    console.addFilter(_FirstTime())
    before = logger.level
    others = {handler: handler.level for handler in logging.getLogger().handlers if handler.level < logging.WARNING}
    for handler in others:  # what was not for them stays so
        handler.setLevel(logging.WARNING)
    logger.setLevel(logging.INFO)
    for handler in (file, console):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in (file, console):
            logger.removeHandler(handler)
        file.close()
        logger.setLevel(before)
        for handler, level in others.items():
            handler.setLevel(level)
