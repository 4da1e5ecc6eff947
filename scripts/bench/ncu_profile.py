"""What do hardware counters tell of ten kernels, and what do they cost?

    python scripts/bench/ncu_profile.py --out scripts/bench/results/ncu_profile.json [--isolation none]

On one NVIDIA GPU, with a server of its own: ten of the kernels of clock_kernels.py are judged with profile="ncu", and once more with the
profile of kernels alone. Writes for each its counters, those that the card lacks, how near it comes to the card's best, and the seconds of
both. Where counters cannot be had, that is the result, with the reason; on hosts whose driver gives them to administrators alone
`--isolation none`, as root, has them all the same, for kernels as trusted as these.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from clock_kernels import Case, cases
from serving import Server, private_server, provenance

from sandbox.client import SandboxRejected
from sandbox.jail.plan import LEVELS
from sandbox.profile.metrics import METRICS
from sandbox.protocol import Candidate, EvaluationResult, Options, TaskSpec

KERNELS = (
    "bench_chain_8192", "bench_chain_1048576", "bench_chain_67108864", "bench_softmax_64_1024", "bench_softmax_1024_4096",
    "bench_softmax_16384_2048", "bench_matmul_256", "bench_matmul_1024", "bench_matmul_2048", "bench_matmul_5888",
)  # fmt: skip


def judged(server: Server, case: Case, options: Options) -> tuple[EvaluationResult, float]:
    """A fresh verdict, and the seconds that it took."""
    start = time.monotonic()
    [result] = server.client.evaluate(
        TaskSpec(reference=case.task, name=case.name, device="cuda:0", atol=case.atol),
        [Candidate(source=f"{case.kernel}\n# profile {options.profile}\n", language="triton")],
        options,
    )
    return result, time.monotonic() - start


def row(server: Server, case: Case) -> dict:
    """One kernel's counters and their cost."""
    result, seconds = judged(server, case, Options(correctness_trials=1, profile="ncu"))
    plain, plain_s = judged(server, case, Options(correctness_trials=1, profile=True))
    own = [counted for counted in result.counters if counted.own]
    return {
        "kernel": case.name, "outcome": result.outcome, "notes": result.notes,
        **({} if result.outcome == "ok" else {"feedback": result.feedback}),
        "seconds": seconds, "seconds_without": plain_s, "counters_s": result.stage_s.get("counters"), "stage_s": result.stage_s,
        "ms": result.timing and result.timing.candidate.median_ms, "ms_without": plain.timing and plain.timing.candidate.median_ms,
        "roofline": result.roofline and result.roofline.model_dump(),
        "absent": [name for name in METRICS if own and name not in own[0].metrics],
        "counters": [counted.model_dump() for counted in result.counters],
    }  # fmt: skip


def said(found: dict) -> str:
    """A row in one line."""
    own = next((counted for counted in found["counters"] if counted["own"]), None)
    if own is None:
        return f"{found['kernel']}: {found['outcome']}, no counters of its own: {'; '.join(found['notes'])}"
    near = f"{100 * found['roofline']['share']:.0f} % of the card ({found['roofline']['bound']})" if found["roofline"] else "no roofline"
    dram = own["metrics"].get("dram__throughput.avg.pct_of_peak_sustained_elapsed", float("nan"))
    warps = own["metrics"].get("sm__warps_active.avg.pct_of_peak_sustained_active", float("nan"))
    return (
        f"{found['kernel']}: {near}; DRAM {dram:.0f} %, warps {warps:.0f} %; {len(own['metrics'])} of {len(METRICS)} counters "
        f"in {found['counters_s']:.1f} s (verdict {found['seconds']:.1f} s, without {found['seconds_without']:.1f} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--isolation", choices=LEVELS, help="of the server (default: the best here)")
    parser.add_argument("--kernels", type=int, default=len(KERNELS), help="the first so many (default: all ten)")
    arguments = parser.parse_args()
    wanted = [case for case in cases() if case.name in KERNELS[: arguments.kernels]]
    report = {**provenance(), "kernels": []}
    level = ["--isolation", arguments.isolation] if arguments.isolation else []
    with private_server("cuda:0", 1, level) as server:
        report |= {"isolation": server.client.health().level, "support": server.client.capabilities().counters.model_dump()}
        try:
            for case in wanted:
                report["kernels"].append(row(server, case))
                arguments.out.write_text(json.dumps(report, indent=1) + "\n")
                print(said(report["kernels"][-1]), flush=True)
        except SandboxRejected as refusal:
            report["refused"] = str(refusal)
    costs = [found["counters_s"] for found in report["kernels"] if found["counters"]]
    report["counted"], report["median_counters_s"] = len(costs), statistics.median(costs) if costs else None
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(report.get("refused") or f"{len(costs)} of {len(wanted)} kernels counted, median {report['median_counters_s']} s -> {arguments.out}")


if __name__ == "__main__":
    main()
