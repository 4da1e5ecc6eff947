"""The reward of a verdict: r = C * (w_correct + w_speed * min(speedup, cap) + w_coverage * coverage)."""

from __future__ import annotations

from sandbox.protocol import Reward, RewardSpec


def reward(spec: RewardSpec, *, correct: bool, speedup: float | None, coverage: float | None) -> Reward:
    """Reward and its weighted parts.

    Args:
      spec: weights and the cap of the speedup.
      correct: False makes every part 0.
      speedup: against eager; None where there is no honest speed (not timed, an interpreter, too little
        coverage).
      coverage: share of device time in the candidate's own kernels; None where it was not measured.
    """
    if not correct:
        return Reward(total=0.0, parts={"correct": 0.0, "speed": 0.0, "coverage": 0.0})
    parts = {
        "correct": spec.w_correct,
        "speed": spec.w_speed * min(speedup, spec.speedup_cap) if speedup is not None else 0.0,
        "coverage": spec.w_coverage * coverage if coverage is not None else 0.0,
    }
    return Reward(total=sum(parts.values()), parts=parts)
