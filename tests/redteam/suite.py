"""All attacks that have a meaning on a CPU."""

from tests.redteam import (
    attacks_channel,
    attacks_clock,
    attacks_comparison,
    attacks_no_kernel,
    attacks_own,
    attacks_timed_path,
)

GPU_ONLY = {1, 2, 6, 7, 37}
"""Numbers whose attack has no form on a CPU, or needs an extension built for a GPU."""

CASES = [
    *attacks_clock.CASES,
    *attacks_timed_path.CASES,
    *attacks_comparison.CASES,
    *attacks_no_kernel.CASES,
    *attacks_channel.CASES,
    *attacks_own.CASES,
]
