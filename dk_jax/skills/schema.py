"""The library's SQLite file: its tables, and how it is opened."""

from __future__ import annotations

import sqlite3
from pathlib import Path

_SCHEMA_VERSION = 1
_SCHEMA = (
    """CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        step INTEGER NOT NULL,
        kind TEXT NOT NULL,
        skill TEXT NOT NULL,
        data TEXT NOT NULL,
        time_s REAL NOT NULL
    )""",
    """CREATE TABLE skills (
        id TEXT PRIMARY KEY, name TEXT NOT NULL, status TEXT NOT NULL, record TEXT NOT NULL
    )""",
    """CREATE TABLE state (
        one INTEGER PRIMARY KEY CHECK (one = 1), step INTEGER NOT NULL, version TEXT NOT NULL
    )""",
    "INSERT INTO state VALUES (1, -1, '')",
    """CREATE TRIGGER events_are_final BEFORE UPDATE ON events
       BEGIN SELECT RAISE(ABORT, 'events are append-only'); END""",
    """CREATE TRIGGER events_stay BEFORE DELETE ON events
       BEGIN SELECT RAISE(ABORT, 'events are append-only'); END""",
    f"PRAGMA user_version = {_SCHEMA_VERSION}",
)


class LibraryError(RuntimeError):
    """The library's file can't be read or written. What is staged is kept."""


def connect(path: Path, timeout_s: float = 30.0) -> sqlite3.Connection:
    """Opens the file in autocommit mode, making the tables if it is new; waits for others' locks for up to `timeout_s`.

    Raises:
        LibraryError: it was written by a newer version.
        sqlite3.Error: it is no database, or can't be opened.
    """
    db = sqlite3.connect(path, isolation_level=None, timeout=timeout_s)
    try:
        version = _version(db)
        if version > _SCHEMA_VERSION:
            raise LibraryError(
                f"{path}: written by a newer version (format {version}; this code reads {_SCHEMA_VERSION})"
            )
        # WAL lets others read while one writes; FULL makes a commit survive the loss of power.
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        if version == 0:
            db.execute("BEGIN IMMEDIATE")
            if _version(db) == 0:
                for statement in _SCHEMA:
                    db.execute(statement)
            db.execute("COMMIT")
    except BaseException:
        db.close()
        raise
    return db


def _version(db: sqlite3.Connection) -> int:
    return db.execute("PRAGMA user_version").fetchone()[0]
