"""The reward of a verdict, by one of two rules: r = C * (w_correct + w_speed * min(speedup, cap) + w_coverage * coverage), or milestones."""

from __future__ import annotations

from sandbox.protocol import Reward, RewardSpec

MILESTONE_MARGIN = 0.05
"""A baseline is beaten where it takes more than 1 + this times as long."""


def reward(
    spec: RewardSpec,
    *,
    correct: bool,
    speedup: float | None,
    coverage: float | None,
    compile_speedup: float | None = None,
    blamed: bool = True,
) -> Reward:
    """Reward and its weighted parts.

    Args:
      spec: which rule, and its weights and cap of the speedup.
      correct: False makes every part 0, or the reward that of a failure.
      speedup: against eager, as it counts (`Timing.credited`); None where there is no honest speed (not timed, an interpreter,
        too little coverage).
      coverage: share of device time in the candidate's own kernels; None where it was not measured.
      compile_speedup: against torch.compile, likewise; None where it was not measured.
      blamed: whether a failure is the candidate's; a task that was rejected is not.
    """
    if spec.kind == "milestones":
        return _milestones(correct, speedup, compile_speedup, spec.failure if blamed else 0.0)
    if not correct:
        return Reward(total=0.0, parts={"correct": 0.0, "speed": 0.0, "coverage": 0.0})
    parts = {
        "correct": spec.w_correct,
        "speed": spec.w_speed * min(speedup, spec.speedup_cap) if speedup is not None else 0.0,
        "coverage": spec.w_coverage * coverage if coverage is not None else 0.0,
    }
    return Reward(total=sum(parts.values()), parts=parts)


def _milestones(correct: bool, speedup: float | None, compile_speedup: float | None, failure: float) -> Reward:
    """CUDA Agent's rule (arXiv 2602.24286): each milestone is worth 1 and needs those before it."""
    eager = correct and speedup is not None and speedup > 1.0 + MILESTONE_MARGIN
    both = eager and compile_speedup is not None and compile_speedup > 1.0 + MILESTONE_MARGIN
    parts = {"correct": 1.0 if correct else failure, "faster_than_eager": float(eager), "faster_than_compile": float(both)}
    return Reward(total=sum(parts.values()), parts=parts)
