"""How CUDA candidates that others have published are judged, and by which roads their extensions are built; nothing cached.

    python scripts/bench/published_cuda.py --kernels optimized_cuda_code/codes/h100.json --plain 10 --out published_cuda.json

KERNELS is a file as CUDA-L1 publishes it: {"1": [{"task_id": 1, "ref_code": ..., "custom_code": ...}, ...], "2": ..., "3": ...}, by
KernelBench's levels. Every distinct candidate that calls `load_inline` or `load` is judged against its reference, all at once, by a server
of its own with an empty cache and all roads allowed. With `--plain N`, N of them drawn at random are judged again by a second server that
only knows PyTorch's own way to build (SANDBOX_ROADS=plain): the report says where the verdicts differ. It holds nothing of the file but
the tasks' ids.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import awaited, builds_of, by_road, private_server, provenance

from sandbox.build.roads import ROADS_VARIABLE
from sandbox.client import SandboxClient, SandboxRejected
from sandbox.protocol import Candidate, EvaluationResult, Options, TaskSpec

FEEDBACK_CHARS = 300
_BUILDS = re.compile(r"\bload_inline\b|\bcpp_extension\b")
_ENTRY_POINT = re.compile(r"^class ModelNew\b", re.MULTILINE)
_QUOTE = re.compile(r"^\s*\d*\s*\|")
"""What GCC puts before a line of the source."""


@dataclass(frozen=True)
class Published:
    """A candidate and its task. `name`: the level and the task's id, such as "2/57"."""

    name: str
    reference: str
    candidate: str


def published(data: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Published]:
    """The distinct candidates that build extensions, in the file's order; one without code is left out.

    Raises:
      ValueError: the file has another form.
    """
    found: dict[str, Published] = {}
    try:
        for level, rows in data.items():
            for row in rows:
                code = row["custom_code"]
                if code and _BUILDS.search(code):
                    found.setdefault(code, Published(f"{level}/{row['task_id']}", row["ref_code"], code))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a file of levels, each a list of task_id, ref_code and custom_code: {error!r}") from error
    return list(found.values())


def without_source(text: str, source: str) -> str:
    """A text less the lines that a compiler or an interpreter quotes from the source, and what they mark them with."""
    kept = []
    for line in text.splitlines():
        bare = _QUOTE.sub("", line).strip()
        if bare.strip("^~ ") and not (len(bare) > 3 and bare in source):
            kept.append(line)
    return "\n".join(kept)


def row(kernel: Published, result: EvaluationResult) -> dict[str, Any]:
    """What the report keeps of a verdict."""
    feedback = "" if result.outcome == "ok" else without_source(result.feedback, kernel.candidate)[:FEEDBACK_CHARS]
    return {
        "task": kernel.name,
        "outcome": result.outcome,
        **builds_of(result),
        "stage_s": result.stage_s,
        "speedup": result.timing and round(result.timing.speedup, 3),
        "feedback": feedback,
    }


def differences(rows: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where the second rows have other outcomes than the first ones of the same tasks."""
    first = {row["task"]: row for row in rows}
    return [
        {"task": row["task"], "all_roads": first[row["task"]]["outcome"], "plain": row["outcome"], "roads": first[row["task"]]["roads"]}
        for row in again
        if row["outcome"] != first[row["task"]]["outcome"]
    ]


def submitted(client: SandboxClient, kernel: Published, device: str, options: Options) -> str:
    """The id of its evaluation. On a CPU it is judged as C++.

    Raises:
      ValueError, SandboxRejected: it is larger than what is judged, or the like.
    """
    entry_point = "ModelNew" if _ENTRY_POINT.search(kernel.candidate) else "Model"
    language = "cuda" if device.startswith("cuda") else "cpp"
    task = TaskSpec(reference=kernel.reference, name=kernel.name, device=device)
    return client.submit(task, [Candidate(source=kernel.candidate, language=language, entry_point=entry_point)], options)[0]


def judged(client: SandboxClient, kernels: Sequence[Published], device: str, options: Options) -> list[dict[str, Any]]:
    """Submits all, and prints a line for each as its verdict is awaited."""
    start, rows, waiting = time.monotonic(), [], []
    for kernel in kernels:
        try:
            waiting.append((kernel, submitted(client, kernel, device, options)))
        except (ValueError, SandboxRejected) as error:
            said = str(error)[:FEEDBACK_CHARS] if isinstance(error, SandboxRejected) else type(error).__name__
            rows.append({"task": kernel.name, "outcome": "refused", "roads": [], "build_s": [], "feedback": said})
            print(f"{kernel.name}: refused", flush=True)
    for kernel, evaluation_id in waiting:
        [result] = awaited(client, [evaluation_id])
        rows.append(row(kernel, result))
        print(f"{kernel.name}: {result.outcome} by {rows[-1]['roads']}, {time.monotonic() - start:.1f} s after the start", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--timing", choices=["none", "quick"], default="none")
    parser.add_argument("--build-s", type=float, default=300.0)
    parser.add_argument("--memory-gib", type=float, default=16.0, help="each candidate's limit")
    parser.add_argument("--only", nargs="*", help='tasks such as "2/57", instead of all')
    parser.add_argument("--plain", type=int, default=0, help="how many to judge again with the plain road alone")
    parser.add_argument("--seed", type=int, default=0, help="of which these are")
    arguments = parser.parse_args()
    try:
        kernels = published(json.loads(arguments.kernels.read_text()))
    except ValueError as error:
        raise SystemExit(f"{arguments.kernels}: {error}") from error
    kernels = [kernel for kernel in kernels if not arguments.only or kernel.name in arguments.only]
    if not kernels:
        raise SystemExit(f"{arguments.kernels}: no candidate builds an extension")
    options = Options(timing=arguments.timing, build_s=arguments.build_s, memory_bytes=int(arguments.memory_gib * 2**30))
    start = time.monotonic()
    with private_server(arguments.device, arguments.workers, environment={ROADS_VARIABLE: ""}) as server:
        rows = judged(server.client, kernels, arguments.device, options)
    report = {
        **provenance(),
        "kernels": arguments.kernels.name,
        "candidates": len(rows),
        "seconds": round(time.monotonic() - start, 1),
        "outcomes": dict(Counter(entry["outcome"] for entry in rows)),
        **by_road(rows),
    }
    if arguments.plain:
        drawn = random.Random(arguments.seed).sample(kernels, min(arguments.plain, len(kernels)))
        start = time.monotonic()
        with private_server(arguments.device, arguments.workers, environment={ROADS_VARIABLE: "plain"}) as server:
            again = judged(server.client, drawn, arguments.device, options)
        report["plain"] = {
            "candidates": len(again),
            "seconds": round(time.monotonic() - start, 1),
            **by_road(again),
            "differ": differences(rows, again),
            "rows": again,
        }
    report["rows"] = rows
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    brief = {key: value for key, value in report.items() if key not in ("rows", "plain")}
    print(json.dumps(brief | {"differ": report.get("plain", {}).get("differ")}, indent=1))


if __name__ == "__main__":
    main()
