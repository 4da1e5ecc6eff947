"""Counters and gauges of the broker in Prometheus' text format."""

from __future__ import annotations

from collections import defaultdict

from sandbox.protocol import EvaluationResult

_HELP = {
    "sandbox_evaluations_total": ("counter", "Finished evaluations by outcome"),
    "sandbox_cached_total": ("counter", "Evaluations answered from the cache of verdicts"),
    "sandbox_retries_total": ("counter", "Evaluations repeated after a fault of the judge"),
    "sandbox_worker_restarts_total": ("counter", "Oracle processes that were replaced"),
    "sandbox_stage_seconds_total": ("counter", "Time spent in each stage of evaluations"),
    "sandbox_rejected_requests_total": ("counter", "Requests answered with an error, by status"),
    "sandbox_queue_waiting": ("gauge", "Evaluations that wait for an oracle"),
    "sandbox_queue_running": ("gauge", "Evaluations that run"),
    "sandbox_running": ("gauge", "Evaluations that run, by the stage that they have reached"),
    "sandbox_builds_total": ("counter", "Extensions that were asked for, by the road that built them, or failed"),
    "sandbox_builds_cached_total": ("counter", "Extensions found in the cache"),
    "sandbox_exclusive_seconds_total": ("counter", "Time that a device was kept for timing alone"),
    "sandbox_workers_ready": ("gauge", "Oracle processes that are up"),
    "sandbox_node_workers_ready": ("gauge", "Oracle processes that are up, by node of the fleet"),
    "sandbox_node_evaluations_total": ("counter", "Evaluations that came to an end, by node of the fleet"),
    "sandbox_nodes_lost_total": ("counter", "Nodes of the fleet that went out of service"),
}


class Metrics:
    """Values by metric name and at most one label."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def add(self, name: str, value: float = 1.0, **label: str) -> None:
        """Raises a counter. Raises KeyError for a name that is not declared."""
        _HELP[name]
        self._values[name][_label(label)] += value

    def set(self, name: str, value: float, **label: str) -> None:
        """Sets a gauge, or a counter that is kept elsewhere. Raises KeyError for a name that is not declared."""
        _HELP[name]
        self._values[name][_label(label)] = value

    def count_work(self, result: EvaluationResult) -> None:
        """Counts what the judge has done for a verdict of its own, not of the cache."""
        for stage, seconds in result.stage_s.items():
            self.add("sandbox_stage_seconds_total", seconds, stage=stage)
        for build in result.builds:
            self.add("sandbox_builds_total", road=build.road or "failed")
            self.add("sandbox_builds_cached_total", float(build.cached))

    def text(self) -> str:
        """The exposition text; metrics without a value show as 0."""
        lines = []
        for name, (kind, help_text) in _HELP.items():
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
            values = self._values.get(name) or {"": 0.0}
            lines += [f"{name}{label} {value:.15g}" for label, value in sorted(values.items())]
        return "\n".join(lines) + "\n"


def _label(label: dict[str, str]) -> str:
    inner = ",".join(f'{key}="{value}"' for key, value in label.items())
    return f"{{{inner}}}" if inner else ""
