"""The orderly end of a server: it takes no more work, finishes what it has, and waits until that has been fetched."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from sandbox.logs import fields
from sandbox.records import Record

log = logging.getLogger("sandbox.drain")
FETCH_S = 5.0
"""So long finished results wait for the next one to be fetched; clients that have gone never ask."""
LOOK_S = 0.05


async def drain(records: Sequence[Record], within_s: float, at_once: Callable[[], bool]) -> int:
    """Waits until evaluations are done and their results have been fetched.

    Args:
      records: those whose results nobody had been given when the server stopped taking work.
      within_s: longest time to wait.
      at_once: whether to wait no longer.

    Returns:
      How many are not done.
    """
    log.info("draining", extra=fields(unfinished=len(records), within_s=within_s))
    start = time.monotonic()
    moved, fetched = start, 0
    while not at_once() and time.monotonic() - start < within_s:
        now_fetched, done = sum(record.fetched for record in records), all(record.done.is_set() for record in records)
        if now_fetched > fetched or not done:
            moved, fetched = time.monotonic(), now_fetched
        if done and (fetched == len(records) or time.monotonic() - moved > FETCH_S):
            break
        await asyncio.sleep(LOOK_S)
    left = sum(not record.done.is_set() for record in records)
    if left:
        log.warning("%d evaluations are given up; their clients must ask a successor", left)
    log.info("drained", extra=fields(unfinished=left, seconds=time.monotonic() - start))
    return left
