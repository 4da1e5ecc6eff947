"""How long an evaluation is likely to take, by the words of its source: a guess that says in which order a client's own work begins.

Whoever waits for a batch waits for its last verdict, and a long build that begins last is waited for alone. Of work that comes
within seconds the longest therefore begins first (longest processing time first: Graham, SIAM J. Appl. Math. 17, 1969); as what is
expected is a head start in seconds and no rank, nothing waits for ever behind longer work that keeps coming.
"""

from __future__ import annotations

import re

from sandbox.protocol import Candidate

_TEMPLATES = re.compile(r"#\s*include\s*[<\"](?:cub|thrust|cutlass|cute|cuda/std)/")
"""Libraries of templates, which take nvcc several times as long as all else."""
_SECONDS = {"triton": 0.3, "cpp": 1.0, "cuda": 3.0}
_MODULE_S, _TEMPLATES_S = 3.0, 9.0
"""Seen on an H200's host (scripts/bench/results/judge_speed.json)."""


def expected_s(candidate: Candidate) -> float:
    """Seconds that building and judging it takes on an idle server, nothing cached."""
    if candidate.language == "cuda" and _TEMPLATES.search(candidate.source):
        return _TEMPLATES_S
    if candidate.language == "cpp" and candidate.form == "module":
        return _MODULE_S
    return _SECONDS[candidate.language]
