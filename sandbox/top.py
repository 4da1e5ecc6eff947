"""A running server as one looks at it: what waits, what runs, how fast verdicts come, and where their time goes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sandbox.client import SandboxClient
from sandbox.protocol import Health

_LINE = re.compile(r"^(\w+)(?:\{\w+=\"([^\"]*)\"\})? ([-+.\deEinfa]+)$")
WIDTH = 120
"""Where the output is no terminal."""


@dataclass(frozen=True)
class Look:
    """One look at a server. `values`: of each metric by the value of its label, "" where it has none."""

    at_s: float
    health: Health
    values: dict[str, dict[str, float]]

    @classmethod
    def take(cls, client: SandboxClient) -> Look:
        """Raises what the client raises."""
        return cls(time.monotonic(), client.health(), parse(client.metrics()))

    def total(self, metric: str) -> float:
        return sum(self.values.get(metric, {}).values())


def parse(text: str) -> dict[str, dict[str, float]]:
    """Prometheus' text format with at most one label a metric; lines of any other form are left out."""
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match:
            name, label, value = match.groups()
            found.setdefault(name, {})[label or ""] = float(value)
    return found


def view(before: Look, now: Look) -> Group:
    """What has come to be since `before`, and what is now."""
    seconds = max(now.at_s - before.at_s, 1e-6)
    health, queue = now.health, now.health.queue
    head = Text(f"sandbox {health.version}  {health.status}  isolation {health.level}  {', '.join(health.devices)}  up {_duration(health.uptime_s)}")
    work = Text(
        f"waiting {queue.waiting} of {queue.limit}  running {queue.running}  oracles {queue.workers_ready}/{queue.workers}  "
        f"verdicts {(now.total('sandbox_evaluations_total') - before.total('sandbox_evaluations_total')) / seconds:.1f}/s  "
        f"retried {now.total('sandbox_retries_total'):.0f}  oracles replaced {now.total('sandbox_worker_restarts_total'):.0f}"
    )
    tables = [
        _table("outcome", "verdicts", before, now, "sandbox_evaluations_total", per_s="verdicts/s", seconds=seconds),
        _table("stage", "seconds", before, now, "sandbox_stage_seconds_total", per_s="at once", seconds=seconds),
        _table("device", "alone, s", before, now, "sandbox_exclusive_seconds_total", per_s="share", seconds=seconds),
        _table("node", "verdicts", before, now, "sandbox_node_evaluations_total", per_s="verdicts/s", seconds=seconds),
    ]
    ready = [f"{name} {n:.0f}" for name, n in now.values.get("sandbox_node_workers_ready", {}).items() if name]
    nodes = [Text("oracles by node: " + "  ".join(ready))] if ready else []
    running = {stage: n for stage, n in now.values.get("sandbox_running", {}).items() if n}
    reached = Text("running after: " + ("  ".join(f"{stage} {n:.0f}" for stage, n in running.items()) or "nothing"))
    cached = Text(f"answered from the cache: {now.total('sandbox_cached_total'):.0f}")
    return Group(head, work, reached, cached, *nodes, *(table for table in tables if table.row_count))


def watch(client: SandboxClient, every_s: float, *, once: bool = False) -> None:
    """Shows the server until interrupted, or `once`.

    Raises:
      SandboxUnavailable: it is gone.
    """
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    views = _views(client, every_s)
    if once:
        console.print(next(views))
        return
    with Live(next(views), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        for one in views:
            live.update(one, refresh=True)


def _views(client: SandboxClient, every_s: float) -> Iterator[Group]:
    before = Look.take(client)
    while True:
        time.sleep(every_s)
        now = Look.take(client)
        yield view(before, now)
        before = now


def _table(what: str, total: str, before: Look, now: Look, metric: str, *, per_s: str, seconds: float) -> Table:
    table = Table(box=None, pad_edge=False, width=50)
    for name, justify in ((what, "left"), (total, "right"), (per_s, "right")):
        table.add_column(name, justify=justify)
    values, old = now.values.get(metric, {}), before.values.get(metric, {})
    for label, value in sorted(values.items(), key=lambda entry: -entry[1]):
        if label:
            table.add_row(label, f"{value:.10g}" if value == int(value) else f"{value:.1f}", f"{(value - old.get(label, 0.0)) / seconds:.2f}")
    return table


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
