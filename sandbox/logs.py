"""Logs with named fields: as text for people, or one JSON object a line for machines.

    configure("INFO", "json")
    log.info("judged", extra=fields(evaluation="eval-1f", outcome="ok", seconds=0.4))

    {"time": "2026-11-29T19:20:00.123+00:00", "level": "INFO", "logger": "sandbox.scheduler", "message": "judged",
     "evaluation": "eval-1f", "outcome": "ok", "seconds": 0.4}
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[str, ...] = get_args(LogFormat)
OWN_NAMES = ("time", "level", "logger", "message", "error")
"""What a field can't be called."""


def fields(**values: Any) -> dict[str, Any]:
    """What a call of a logger takes as `extra` to say more than its message; fields that are None are left out.

    Raises:
      ValueError: a name that every line has already.
    """
    if taken := sorted(set(values) & set(OWN_NAMES)):
        raise ValueError(f"a log line has {', '.join(taken)} of its own: name the field otherwise")
    return {"fields": {name: value for name, value in values.items() if value is not None}}


def configure(level: str, style: LogFormat = "text", always: Callable[[], dict[str, Any]] | None = None) -> None:
    """Sets up this process's root logger to write on standard error, warnings and what ends the process included.

    Args:
      level: the least that is written ("INFO").
      style: "text" or "json".
      always: fields of every line, asked for when it is written.
    """
    handler = logging.StreamHandler()
    handler.setFormatter({"text": _Text, "json": _Json}[style](always or dict))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, trace: root.critical("uncaught", exc_info=(kind, error, trace))


class _Formatter(logging.Formatter):
    def __init__(self, always: Callable[[], dict[str, Any]]):
        super().__init__("%(asctime)s %(name)s %(levelname)s %(message)s")
        self._always = always

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        own = {name: value for name, value in self._always().items() if value is not None}
        return own | getattr(record, "fields", {})


class _Text(_Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        said = "".join(f" {name}={_shown(value)}" for name, value in self._fields(record).items())
        return super().formatMessage(record) + said


class _Json(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _shown(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and not any(sign.isspace() or sign in '"=' for sign in text)
    return text if text and plain else json.dumps(text)
