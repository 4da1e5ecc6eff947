"""Which isolation levels the tests can try here."""

from __future__ import annotations

import pytest

from sandbox.jail import probe


def offered_or_skip(level):
    problem = probe.offered().problems[level]
    if problem:
        pytest.skip(f"this host does not offer level {level}: {problem}")
