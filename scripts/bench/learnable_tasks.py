"""What the learnable set is worth: its experts and naive kernels, judged on every task, beside what bytes and arithmetic allow.

    python scripts/bench/learnable_tasks.py --list
    python scripts/bench/learnable_tasks.py --device cuda:0 --out learnable_tasks.json     # at GPU sizes, against eager and torch.compile
    python scripts/bench/learnable_tasks.py --device cpu --out learnable_tasks_cpu.json    # small ones in the interpreter; compiled for sm_90

On a GPU the first `--experts` kernels of dk_jax.sft.expert and a naive one (a kernel an operation) are timed for each task, by a server of
its own with an empty cache. On a CPU an expert, a naive and a wrong kernel are judged at the small size, and the expert and the naive one are
compiled at the GPU's. The file is written after every task; interrupted, or ended by --minutes, the same command goes on, and leaves out
what the file holds already of the same kernels. The exit status is 1 if a kernel is not what it is meant to be, 3 if tasks are left to do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serving import private_server, provenance

from dk_jax.evaluation.results import save_json
from dk_jax.sft.contamination import HeldOut, decontaminate
from dk_jax.sft.corpus import Variant
from dk_jax.sft.expert import ranked
from dk_jax.sft.triton_kernels import triton_variants
from dk_jax.tasks.learnable import GROUPS, families, group, learnable_tasks
from dk_jax.tasks.learnable_costs import H100, H200, costs
from dk_jax.tasks.task import Task
from sandbox.client import SandboxClient
from sandbox.protocol import Candidate, EvaluationResult, Options, TaskSpec

ARCH = "sm_90"
BARS = (1.0, 1.2, 1.5, 2.0)
INTENTS = {"expert": "good", "naive": "slow", "wrong": "wrong"}
FEEDBACK_CHARS = 300


def kernels(kind: str, task: Task, count: int) -> list[Variant]:
    """The first kernels of a kind; no wrong one whose mistake the interpreter can't see, since it computes TF32 products in float32."""
    own = [v for v in triton_variants(task) if v.intent == INTENTS[kind] and not (kind == "wrong" and '"tf32"' in v.source)]
    return ranked(kind, task.family, own)[:count]


def listed() -> str:
    """The table of families and tasks, and how similar training members are to what is held out."""
    lines = []
    tasks = learnable_tasks("gpu")
    for family in families():
        lines.append(f"\n{family.name}: {family.optimisation}")
        for task in (t for t in tasks if t.family == family.name):
            c, spec = costs(task.spec), task.spec
            lines.append(
                f"  {group(task):16} {task.name[len(family.name) + 1 :]:22} {f'{spec.rows} x {spec.cols}':>15} {c.tensors_bytes >> 20:4} MiB"
                f"  eager {c.eager_kernels} kernels, {c.eager_bytes >> 20:4} MiB, {1e6 * c.eager_s(H200):4.0f} us"
                f"  fused {c.fused_bytes >> 20:4} MiB, {1e6 * c.fused_s(H200):4.0f} us  x{c.speedup(H200):.1f} (H100 x{c.speedup(H100):.1f})"
            )
    counts = {name: sum(group(task) == name for task in tasks) for name in GROUPS}
    near = max(_nearest(tasks), key=lambda n: n.similarity)
    lines += [
        f"\n{len(tasks)} tasks of {len(families())} families: {', '.join(f'{n} {name}' for name, n in counts.items())}. Times and ratios are floors "
        f"on an {H200.name}, of passes at full bandwidth.",
        f"The training member most similar to a held-out task: {near.task} to {near.held_out}, {near.similarity:.2f} of the operations.",
    ]
    return "\n".join(lines).strip()


def _nearest(tasks: Sequence[Task]):
    held_out = HeldOut([task for task in tasks if task.split == "held_out"])
    return decontaminate([task for task in tasks if task.split == "train"], held_out).nearest


# --- judging --------------------------------------------------------------------------------------------------------------------------


def digest(task: Task, wanted: Mapping[str, int]) -> str:
    """Of what is judged: a row of other kernels, or of another reference, is measured again."""
    sources = [variant.source for kind, count in wanted.items() for variant in kernels(kind, task, count)]
    return hashlib.sha256("\x1f".join([task.reference, *sources]).encode()).hexdigest()[:16]


def judged(client: SandboxClient, task: Task, wanted: Mapping[str, int], device: str, options: Options) -> dict[str, Any]:
    """A task's row: what its kernels, so many of each kind, came to."""
    chosen = [(kind, variant) for kind, count in wanted.items() for variant in kernels(kind, task, count)]
    candidates = [Candidate(source=variant.source, language="triton") for _, variant in chosen]
    results = client.evaluate(TaskSpec(reference=task.reference, name=task.name, device=device), candidates, options)
    rows = [{"kind": kind, "techniques": sorted(v.techniques), **verdict(r)} for (kind, v), r in zip(chosen, results, strict=True)]
    estimate = costs(task.spec)
    return {
        "group": group(task),
        "family": task.family,
        "digest": digest(task, wanted),
        "estimate": {"eager_ms": 1e3 * estimate.eager_s(H200), "speedup": round(estimate.speedup(H200), 2)} if device != "cpu" else None,
        "kernels": rows,
    }


def verdict(result: EvaluationResult) -> dict[str, Any]:
    """What is kept of one."""
    kept: dict[str, Any] = {"outcome": result.outcome, "feedback": "" if result.correct else result.feedback[:FEEDBACK_CHARS]}
    if (timing := result.timing) is not None:
        compiled = timing.baselines.get("torch.compile")
        kept |= {
            "ms": timing.candidate.median_ms,
            "eager_ms": timing.baselines["eager"].median_ms,
            "speedup": timing.speedup,
            "over_torch_compile": compiled and compiled.median_ms / timing.candidate.median_ms,
            "noisy": timing.noisy,
            "coverage": result.coverage,
        }
    return kept


def compiled(task: Task) -> dict[str, str]:
    """What the compiler says of the expert and the naive kernel at the GPU's sizes; "" where all that forward launches compiles."""
    import torch

    from sandbox.build.triton import aot_compile

    said = {}
    for kind in ("expert", "naive"):
        [variant] = kernels(kind, task, 1)
        with torch.device("meta"):
            arguments = [torch.empty(a.shape) for a in task.spec.arguments if not a.parameter]
            report = aot_compile(variant.source, ARCH, args=arguments)
        said[kind] = "" if report.compiles and not report.stopped else report.summary() + report.stopped
    return said


def surprises(name: str, row: Mapping[str, Any]) -> list[str]:
    """Kernels of a row that are not what they are meant to be."""
    found = [
        f"{name}: a kernel meant to be {k['kind']} was judged {k['outcome']}: {k['feedback']}"
        for k in row["kernels"]
        if (k["outcome"] == "ok") == (k["kind"] == "wrong") or k["outcome"] in ("infra_error", "task_rejected")
    ]
    return found + [f"{name}: the {kind} kernel does not compile for {ARCH}: {said}" for kind, said in row.get("compiled", {}).items() if said]


# --- reporting ------------------------------------------------------------------------------------------------------------------------


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """By group and by family: geometric means of the best expert's and the naive speedup, and how many tasks the expert brings over each bar."""
    timed = [row for row in rows.values() if any(k.get("speedup") for k in row["kernels"])]
    found = {}
    for key in ("group", "family"):
        for name in dict.fromkeys(row[key] for row in timed):
            own = [row for row in timed if row[key] == name]
            best = [top for row in own if (top := _best(row, "expert"))]
            naive = [top for row in own if (top := _best(row, "naive"))]
            found[name] = {
                "tasks": len(own),
                "expert": best and round(statistics.geometric_mean(best), 3),
                "naive": naive and round(statistics.geometric_mean(naive), 3),
                "estimated": round(statistics.geometric_mean([row["estimate"]["speedup"] for row in own]), 3),
                "over": {str(bar): sum(speedup > bar for speedup in best) for bar in BARS},
            }
    return found


def _best(row: Mapping[str, Any], kind: str) -> float | None:
    return max((k["speedup"] for k in row["kernels"] if k["kind"] == kind and k["outcome"] == "ok" and k.get("speedup")), default=None)


def line(name: str, row: Mapping[str, Any]) -> str:
    """A task's line on the screen."""
    told = [k["kind"] + " " + (f"x{k['speedup']:.2f}" if k.get("speedup") else str(k["outcome"])) for k in row["kernels"]]
    estimate = f" (estimated x{row['estimate']['speedup']})" if row["estimate"] else ""
    return f"{name}: {', '.join(told)}{estimate}"


def resumed(path: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The rows that a file holds already.

    Raises:
      SystemExit: they were measured elsewhere, or otherwise.
    """
    if not path.exists():
        return {}
    there = json.loads(path.read_text())
    if there["settings"] != settings:
        raise SystemExit(f"{path} was measured with {there['settings']}, not with {settings}: give another --out, or delete it")
    return there["tasks"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the table and judge nothing")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--experts", type=int, default=3, help="kernels timed as the expert of a task on a GPU")
    parser.add_argument("--only", nargs="*", default=[], help="families, or tasks")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no task after so long; 0 for no limit")
    arguments = parser.parse_args()
    if arguments.list:
        print(listed())
        return 0
    if arguments.out is None:
        parser.error("--out is missing: the file that the result goes into")
    cpu = arguments.device == "cpu"
    named = {task.name for task in learnable_tasks("gpu")} | {family.name for family in families()}
    if unknown := set(arguments.only) - named:
        parser.error(f"--only: there is no family or task {', '.join(sorted(unknown))}; --list shows them")
    wanted = {"expert": 1, "naive": 1, "wrong": 1} if cpu else {"expert": arguments.experts, "naive": 1}
    options = Options(timing="none", target_arch=ARCH, admit=True) if cpu else Options(baselines=["eager", "torch.compile"], admit=True)
    facts = provenance()
    settings = {"device": arguments.device, "kernels": wanted, "card": facts["card"], "versions": facts["versions"]}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    current = {task.name: digest(task, wanted) for task in learnable_tasks("small" if cpu else "gpu")}
    rows = {name: row for name, row in resumed(arguments.out, settings).items() if row["digest"] == current.get(name)}
    pairs = zip(learnable_tasks("small"), learnable_tasks("gpu"), strict=True)
    chosen = [(small, full) for small, full in pairs if not arguments.only or {full.name, full.family} & set(arguments.only)]
    started = time.monotonic()
    with private_server(arguments.device, arguments.workers) as server:
        for small, full in chosen:
            if full.name in rows:
                continue
            if arguments.minutes and time.monotonic() - started > 60 * arguments.minutes:
                break
            row = judged(server.client, small if cpu else full, wanted, arguments.device, options)
            rows[full.name] = row | ({"compiled": compiled(full)} if cpu else {})
            save_json(arguments.out, {**facts, "settings": settings, "summary": summary(rows), "tasks": rows})
            print(line(full.name, rows[full.name]), flush=True)
    print(json.dumps(summary(rows), indent=1))
    found = [said for name, row in rows.items() for said in surprises(name, row)]
    print("\n".join(found), file=sys.stderr)
    left = sum(full.name not in rows for _, full in chosen)
    if left:
        print(f"{left} of {len(chosen)} tasks are left: the same command goes on")
    return 1 if found else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
