"""All attacks that have a meaning on a CPU."""

from tests.redteam import (
    attacks_audit,
    attacks_channel,
    attacks_clock,
    attacks_comparison,
    attacks_fig_leaf,
    attacks_harness,
    attacks_no_kernel,
    attacks_own,
    attacks_resources,
    attacks_timed_path,
)

CASES = [
    *attacks_clock.CASES,
    *attacks_timed_path.CASES,
    *attacks_comparison.CASES,
    *attacks_no_kernel.CASES,
    *attacks_fig_leaf.CASES,
    *attacks_channel.CASES,
    *attacks_harness.CASES,
    *attacks_resources.CASES,
    *attacks_audit.CASES,
    *attacks_own.CASES,
]
