"""Verdicts and decisions as text for a terminal. Nothing is read or printed here."""

from __future__ import annotations

from sandbox.protocol import EvaluationResult, VerificationResult
from sandbox.verdict.feedback import nearness
from sandbox.verdict.timing import MOST_UNREST


def readable(result: EvaluationResult, candidate: str, task: str) -> str:
    """A verdict for people on the candidate and task of these names."""
    lines = [
        f"{candidate} against {task}",
        f"  outcome   {result.outcome} (stage reached: {result.stage})",
    ]
    if result.kernel_signature:
        lines.append(f"  form      {result.kernel_signature}")
    for number, trial in enumerate(result.trials):
        error = f", max abs err {trial.max_abs_err:.3g}" if trial.max_abs_err is not None else ""
        lines.append(
            f"  trial {number + 1}   " + (f"passed{error}" if trial.ok else f"FAILED: {trial.reason}")
        )
    if result.timing:
        timing = result.timing
        rows = [("candidate", timing.candidate), *timing.baselines.items()]
        for name, span in rows:
            interval = f"[{1000 * span.low_ms:.1f}, {1000 * span.high_ms:.1f}]"
            host = "" if span.host_ms is None else f"; the host takes {1000 * span.host_ms:.1f} us to issue a call"
            lines.append(f"  {name:<13} {1000 * span.median_ms:>10.1f} us  95% {interval}, {span.samples} blocks{host}")
        noise = " (noisy: the machine was not calm)" if timing.unrest > MOST_UNREST else " (within noise)" if timing.noisy else ""
        lines.append(f"  speedup   {timing.speedup:.2f}x against eager{noise}; clock: {timing.bound_by}")
        if timing.audited:
            own, eager = (1000 * span.median_ms for span in (timing.audited.candidate, timing.audited.eager))
            how = " (replayed)" if timing.audited.replayed else ""
            lines.append(f"  audited   {own:.1f} us against {eager:.1f} us on inputs never seen{how}")
    if result.coverage is not None:
        lines.append(f"  coverage  {100 * result.coverage:.0f}% of the device time in own kernels")
    lines += [
        f"  kernel    {kernel.name[:60]} {100 * kernel.share:.0f}% {kernel.ms:.3g} ms"
        for kernel in result.kernels[:5]
    ]
    if result.roofline:
        lines.append(f"  {nearness(result.roofline)}")
    for counted in result.counters:
        whose = {True: "own", False: "not own", None: "whose is not known"}[counted.own]
        lines.append(f"  counters  {counted.kernel[:60]} ({whose}), mean of {counted.launches} launches")
        lines += [f"    {name:<68} {value:>16,.6g} {counted.units.get(name, '')}" for name, value in counted.metrics.items()]
    lines += [f"  integrity {finding.rule}: {finding.evidence}" for finding in result.integrity]
    lines += [f"  note      {note}" for note in result.notes]
    parts = ", ".join(f"{name} {value:.2f}" for name, value in result.reward.parts.items())
    lines.append(f"  reward    {result.reward.total:.2f} ({parts})")
    lines.append(
        "  stages    " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in result.stage_s.items())
    )
    lines += ["  feedback:", *(f"    {line}" for line in result.feedback.splitlines())]
    return "\n".join(lines)


def readable_decision(result: VerificationResult) -> str:
    """A verification of one arm for people."""
    decision, [arm] = result.decision, result.arms
    interval = "" if decision.low is None else f", 95% [{decision.low:.2f}, {decision.high:.2f}]"
    p = "" if decision.p is None else f", p = {decision.p:.3g} (allowed {decision.spent:.3g})"
    lines = [f"{decision.status.upper()}: {decision.reason}", f"  effect    {decision.effect:.2f}x over {decision.n} pairs{interval}{p}"]
    for number, (control, treated) in enumerate(zip(arm.control, arm.treated, strict=True)):
        sides = (f"{one.speedup:.2f}x" if one.earned_speedup else f"{one.outcome}, no speed" for one in (control, treated))
        lines.append(f"  pair {number + 1:<4} control {next(sides)}, treated {next(sides)}")
    return "\n".join(lines)
