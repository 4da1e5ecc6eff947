"""`python -m sandbox admit`: what is to be known of task files before kernels are written for them, in readable lines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sandbox.client import SandboxClient
from sandbox.protocol import Admission, Options, TaskFacts, TaskSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the command alone; the server's are added beside them."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Python files with Model, get_inputs, get_init_inputs")
    parser.add_argument("--entry-point", default="Model", help="name of the class (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--timing", default="quick", choices=["none", "quick"], help="none: calls are not timed")
    parser.add_argument("--memory-gb", type=float, default=4.0, help="that a process may use on a CPU (default: %(default)g)")
    parser.add_argument("--socket", type=Path, help="use the server on this socket instead of a private one")
    parser.add_argument("--json", action="store_true", help="print an object a line")


def specs(arguments: argparse.Namespace, texts: list[str], device: str) -> tuple[list[TaskSpec], Options]:
    """Tasks of the files with these texts, and the limits to keep to. Raises ValidationError."""
    tasks = [
        TaskSpec(reference=text, name=path.stem, entry_point=arguments.entry_point, dtype=arguments.dtype, device=device)
        for path, text in zip(arguments.files, texts, strict=True)
    ]
    return tasks, Options(memory_bytes=int(arguments.memory_gb * (1 << 30)))


def run(client: SandboxClient, arguments: argparse.Namespace, tasks: list[TaskSpec], options: Options) -> None:
    """Examines one task after the other and prints what is found as it comes."""
    for path, task in zip(arguments.files, tasks, strict=True):
        found = client.examine(task, options, arguments.timing)
        if arguments.json:
            print(json.dumps({"file": str(path), **found.model_dump(), "refusal": found.refusal, "marks": found.marks}), flush=True)
        else:
            print(readable(str(path), found), flush=True)


def readable(name: str, found: Admission) -> str:
    """What was found out about the task of this name, for people."""
    said = "REFUSED" if found.refusal else "ADMITTED with marks" if found.marks else "ADMITTED"
    lines = [f"{name}: {said}"]
    if found.refusal:
        lines.append(f"  reason    {found.refusal}")
    lines += [f"  mark      {mark}" for mark in found.marks]
    return "\n".join(lines + (_facts(found.facts) if found.facts else []))


def _facts(facts: TaskFacts) -> list[str]:
    if facts.eager_ms is None:
        time = "not timed"
    else:
        time = f"{1000 * facts.eager_ms:.1f} us in eager, 95% [{1000 * facts.eager_low_ms:.1f}, {1000 * facts.eager_high_ms:.1f}]"
        if facts.launch_ms is None:
            time += "; the share of launches is not known on a CPU"
        else:
            time += f"; shortest launch {1000 * facts.launch_ms:.1f} us, least traffic {1000 * (facts.floor_ms or 0.0):.1f} us"
            time += f", the host issues a call in {1000 * facts.host_ms:.1f} us" if facts.host_ms is not None else ""
    sizes = f"inputs {_mb(facts.input_bytes)}, outputs {_mb(facts.output_bytes)}, state {_mb(facts.state_bytes)}"
    held = f"the reference's process {_mb(facts.peak_bytes)}, a judging at least {_mb(facts.needed_bytes)} of {_mb(facts.total_bytes)}"
    return [
        f"  time      {time}",
        f"  memory    {sizes}; {held}",
        f"  judging   about {facts.judging_s:.2f} s beside a candidate's build",
    ]


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.3g} MB" if n_bytes < 1e9 else f"{n_bytes / 1e9:.3g} GB"
