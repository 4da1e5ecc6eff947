"""What every known attack on the judge comes to: outcome, and speed against its honest twin.

    python scripts/bench/redteam.py [--gpu] [--only WORDS] [--share 1/2] [--together 8] [--out scripts/bench/results/redteam_cpu.json]

Starts a server of its own with an empty cache, judges the cases of tests/redteam (attacks, then honest work; with --gpu those
of tests/gpu/redteam; with --together so many at once, each beside the others' work), prints a table and writes JSON with versions,
date and command. The exit status is 1 if an attack gained or honest work failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serving import ROOT, provenance

from tests.gpu.redteam import attacks, attacks_audit
from tests.gpu.redteam.ported import CASES as PORTED
from tests.gpu.redteam.ported import GpuRedTeam, as_case, honest_work
from tests.redteam import honest, suite
from tests.redteam.attacks_channel import plant_secret, remove_secret
from tests.redteam.case import RedTeam, problems
from tests.sandbox.helpers import running_server

GPU_CASES = [*map(as_case, (*attacks.CASES, *attacks_audit.CASES)), *PORTED]


def attack_row(red_team: RedTeam, case) -> dict:
    """One attack's outcome as a row of the report."""
    start = time.monotonic()
    report = red_team.attack(case)
    canary = red_team.canary()
    found = problems(case, report)
    if canary.outcome != "ok":
        found.append(f"the honest evaluation after it: {canary.outcome}")
    return {
        "number": case.number,
        "name": case.name,
        "outcome": report.result.outcome,
        "rules": [finding.rule for finding in report.result.integrity],
        "speedup": report.speedup,
        "twin_speedup": report.twin,
        "bound_by": report.result.timing and report.result.timing.bound_by,
        "seconds": round(time.monotonic() - start, 2),
        "problems": found,
    }


def honest_row(red_team: RedTeam, case) -> dict:
    """One honest candidate's outcome as a row of the report."""
    result = red_team.judge(case.candidate, case.task, case.options)
    flagged = result.outcome != "ok" or result.integrity
    return {
        "name": case.name,
        "outcome": result.outcome,
        "speedup": result.speedup,
        "coverage": result.coverage,
        "bound_by": result.timing and result.timing.bound_by,
        "problems": [result.feedback] if flagged else [],
    }


def main() -> None:
    """Judges all cases, prints the table, writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains one of these words, separated by commas")
    parser.add_argument("--gpu", action="store_true", help="on cuda:0, its own cases and those of the CPU that run there")
    parser.add_argument("--share", type=_share, default=(1, 1), help="I/N: of every N cases the I-th, so that N cards share the work")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="N cases at once by N workers: the judge under load")
    parser.add_argument("--out", type=Path, help="default: redteam_cpu.json or redteam_gpu.json in scripts/bench/results")
    arguments = parser.parse_args()
    out = arguments.out or ROOT / f"scripts/bench/results/redteam_{'gpu' if arguments.gpu else 'cpu'}.json"
    device = ("--device", "cuda:0") if arguments.gpu else ()
    words = arguments.only.split(",")
    share, shares = arguments.share
    attack_cases = (GPU_CASES if arguments.gpu else suite.CASES)[share - 1 :: shares]
    honest_cases = (honest_work() if arguments.gpu else honest.CASES)[share - 1 :: shares]
    plant_secret()
    try:
        with tempfile.TemporaryDirectory(prefix="sbt-", dir="/tmp") as name:
            workers = ("--workers", str(arguments.together))
            with (
                running_server(Path(name), *workers, *device) as server, server.client() as client, ThreadPoolExecutor(arguments.together) as pool
            ):  # fmt: skip
                health = client.health()
                red_team = GpuRedTeam(client) if arguments.gpu else RedTeam(client)
                print(f"{'case':44} {'outcome':14} {'speed':>8} {'twin':>8}  verdict", flush=True)

                def rows(judge: Callable[[RedTeam, Any], dict], cases: Sequence[Any], label: Callable[[Any], str]) -> list[dict]:
                    named = [case for case in cases if any(word in case.name for word in words)]
                    found = []
                    for case, row in zip(named, pool.map(lambda case: judge(red_team, case), named), strict=True):
                        found.append(row)
                        _print(row, label(case))
                    return found

                attacks = rows(attack_row, attack_cases, lambda case: f"{case.number:02} {case.name}")
                honests = rows(honest_row, honest_cases, lambda case: f"honest {case.name}")
    finally:
        remove_secret()
    bad = [row["name"] for row in (*attacks, *honests) if row["problems"]]
    report = {
        **provenance(),
        "level": health.level,
        "share": f"{share}/{shares}",
        "together": arguments.together,
        "attacks": len(attacks),
        "honest": len(honests),
        "failed": bad,
        "attack_rows": attacks,
        "honest_rows": honests,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(attacks)} attacks, {len(honests)} honest candidates, {len(bad)} not as they must be: {bad}")
    sys.exit(1 if bad else 0)


def _share(text: str) -> tuple[int, int]:
    share, _, shares = text.partition("/")
    if not (share.isdigit() and shares.isdigit() and 1 <= int(share) <= int(shares)):
        raise argparse.ArgumentTypeError(f"{text!r} is no share such as 1/2")
    return int(share), int(shares)


def _print(row: dict, label: str) -> None:
    speed, twin = (f"{row[key]:.2f}x" if row.get(key) else "-" for key in ("speedup", "twin_speedup"))
    verdict = row["problems"][0].splitlines()[0] if row["problems"] else "as it must be"
    print(f"{label:44} {row['outcome']:14} {speed:>8} {twin:>8}  {verdict[:90]}", flush=True)


if __name__ == "__main__":
    main()
