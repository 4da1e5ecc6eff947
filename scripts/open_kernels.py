"""Real Triton kernels for the cold start: extracts them from installed open packages and has the sandbox judge every one.

    pip install --no-deps liger-kernel flag-gems fla-core                      # or some of them; nothing of them is imported
    python scripts/open_kernels.py --list                                      # what extracts and what does not, and why
    python scripts/open_kernels.py --output=open_kernels.jsonl                 # Triton's interpreter checks, ptxas compiles for sm_90
    python scripts/open_kernels.py --output=open_kernels.jsonl --device=cuda:0 # checked and timed at sizes of real models

Verdicts are kept in OUTPUT.journal.jsonl as they come; the same command goes on where it was stopped.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absl import app, flags  # noqa: E402

_OUTPUT = flags.DEFINE_string("output", "", "JSONL file of records.")
_ROOT = flags.DEFINE_multi_string("root", [], "Folder that holds packages, as pip install --target makes it; may be given several times.")
_SANDBOX = flags.DEFINE_string("sandbox", "", "Socket of a running sandbox (default: one of this command's own).")
_DEVICE = flags.DEFINE_string("device", "cpu", "Where to judge: cpu or cuda:N.")
_ARCH = flags.DEFINE_string("target_arch", "sm_90", "On a CPU: the GPU that kernels must compile for; empty: do not compile.")
_LIST = flags.DEFINE_bool("list", False, "Only say what extracts and what does not, and why.")
_ONLY = flags.DEFINE_list("only", [], "Names of problems, instead of all.")
_SHOW = flags.DEFINE_bool("show", False, "With --list: the extracted sources too.")
_SUMMARY = flags.DEFINE_string("summary", "", "JSON file for outcomes by kernel, without any text of the packages.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Evaluations in progress at once.", lower_bound=1)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    if not (_OUTPUT.value or _LIST.value):
        raise app.UsageError("where to? --output=FILE, or --list to only look")
    from dk_jax.rollout.supervise import SandboxStartError
    from dk_jax.sft.open_source.packages import PackageError
    from sandbox.client import SandboxUnavailable

    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    try:
        return _run()
    except (OSError, ValueError, PackageError, SandboxStartError, SandboxUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run() -> int:
    from tqdm import tqdm

    from dk_jax.sft.open_source.catalogue import catalogue
    from dk_jax.sft.open_source.kernels import counts_table, extract_all, judge_candidates, save_open_kernels, summary
    from dk_jax.sft.open_source.packages import find_packages

    packages = find_packages([Path(root) for root in _ROOT.value])
    problems = catalogue()
    if unknown := sorted(set(_ONLY.value) - {p.name for p in problems}):
        raise ValueError(f"--only: the catalogue has no {', '.join(unknown)}; --list shows its names")
    problems = tuple(p for p in problems if not _ONLY.value or p.name in _ONLY.value)
    with tqdm(total=sum(len(p.launches) for p in problems), desc="extracting", unit="kernel") as bar:
        candidates, refusals = extract_all(problems, packages, progress=bar.update)
    for package in packages:
        print(f"{package.distribution} {package.version}, {package.licence}")
    if _LIST.value:
        _list(candidates, refusals)
        return 0
    _tell_refusals(refusals)
    output = Path(_OUTPUT.value)
    output.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        judge = _judge(stack, output)
        size = "small" if _DEVICE.value == "cpu" else "gpu"
        with tqdm(total=len(candidates), desc="judging", unit="kernel") as bar:
            records = judge_candidates(candidates, judge, size=size, timed=_DEVICE.value != "cpu", progress=bar.update)
    save_open_kernels(output, records)
    for record in records:
        if record.outcome != "ok":
            said = " ".join(record.kernel.verdict.feedback.split())[:300]
            print(f"{record.outcome}: {record.task.name} from {record.provenance.launcher}: {said}")
    if _SUMMARY.value:
        _write(Path(_SUMMARY.value), {"device": _DEVICE.value, "size": size, **_versions(), **summary(records, refusals, packages)})
    print(counts_table(records, refusals))
    print(f"{len(records)} records -> {output}")
    return 0


def _list(candidates, refusals) -> None:
    for candidate in candidates:
        found = f"  [{', '.join(candidate.techniques)}]" if candidate.techniques else ""
        print(f"{candidate.problem.name:32} {candidate.launch.path}  {len(candidate.source):,} characters{found}")
        if _SHOW.value:
            print(candidate.source)
    _tell_refusals(refusals)
    problems = {c.problem.name for c in candidates}
    print(f"{len(candidates)} kernels of {len(problems)} problems extract, {len(refusals)} do not")


def _tell_refusals(refusals) -> None:
    from dk_jax.sft.open_source.kernels import ABSENT

    for refusal in refusals:
        if refusal.reason != ABSENT:
            print(f"not extracted: {refusal.problem.name} from {refusal.launch.path}: {refusal.reason}")
    for name, count in Counter(r.distribution for r in refusals if r.reason == ABSENT).items():
        print(f"not installed: {name}, of which the catalogue has {count} kernels (pip install --no-deps {name})")


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "triton")}


def _write(path: Path, report: dict) -> None:
    """A line a kernel, all else indented; complete or not at all."""
    kernels = ",\n".join(f"  {json.dumps(kernel)}" for kernel in report.pop("kernels"))
    text = json.dumps(report, indent=1).removesuffix("\n}") + f',\n "kernels": [\n{kernels}\n ]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _judge(stack: contextlib.ExitStack, output: Path):
    from dk_jax.command_line import check_socket
    from dk_jax.rollout.judge import Journal, SandboxJudge
    from dk_jax.rollout.supervise import SandboxProcess
    from sandbox.client import SandboxClient
    from sandbox.protocol import Options

    socket = _SANDBOX.value
    if socket:
        check_socket(socket)
    else:
        arguments = ["--device", _DEVICE.value, "--workers", str(_WORKERS.value), "--threads", "1"]
        log_path = output.with_suffix(output.suffix + ".sandbox.log")
        socket = stack.enter_context(SandboxProcess(arguments, log_path=log_path)).socket
    journal = Journal(output.with_suffix(output.suffix + ".journal.jsonl"))
    stack.callback(journal.close)
    on_cpu = _DEVICE.value == "cpu"
    options = Options(
        correctness_trials=3, timing="quick", profile=not on_cpu, target_arch=_ARCH.value or None if on_cpu else None, admit=True,
        check_s=180, build_s=180,
    )  # fmt: skip
    client = stack.enter_context(SandboxClient(socket, retry_for_s=120))
    return SandboxJudge(
        client=client, device=_DEVICE.value, language="triton", form="module", options=options, verify_options=options, journal=journal,
        max_parallel=2 * _WORKERS.value, retry_for_s=600,
    )  # fmt: skip


if __name__ == "__main__":
    app.run(main)
