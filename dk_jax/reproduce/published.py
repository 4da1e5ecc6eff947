"""The paper's figures for its own ablations (daVinci-kernel, arXiv 2606.16497, 8B; per cent of KernelBench's tasks, last turn, over eager), and
how a comparison here stands to them: in direction, not in size, as model, tasks and card are others."""

from __future__ import annotations

FIGURES: dict[str, dict[str, float]] = {
    "full": {"L1 Fast_1": 26.1, "L2 Fast_1": 44.8, "L3 Fast_1": 10.1, "L2 Fast_1.2": 22.1, "L2 Fast_2": 7.9, "L3 Fast_1.5": 2.0},
    "no_injection": {"L1 Fast_1": 16.2, "L2 Fast_1": 20.6, "L3 Fast_1": 2.0, "L2 Fast_1.2": 10.5},
    "policy_only": {"L2 Fast_1": 45.1, "L2 Fast_1.2": 16.9},
    "bm25_only": {"L2 Fast_1": 51.2, "L2 Fast_1.2": 8.2, "L3 Fast_1.5": 0.2},
    "no_skills": {"L2 Fast_1": 51.6, "L3 Fast_1.5": 0.0},
}
COLUMNS = ("L1 Fast_1", "L2 Fast_1", "L3 Fast_1", "L2 Fast_1.2", "L2 Fast_2", "L3 Fast_1.5")


def differences(arm: str) -> dict[str, float]:
    """Full less an arm, in points, by figure; those that the paper gives for both."""
    own = FIGURES.get(arm, {})
    return {name: FIGURES["full"][name] - value for name, value in own.items() if arm != "full"}


def agreement(paper: float, sign: int) -> str:
    """In words: how a difference of ours, by its clear sign (0: none), stands to one of the paper."""
    if sign == 0:
        return "not told apart here"
    return "agrees" if (paper > 0) == (sign > 0) else "disagrees"
