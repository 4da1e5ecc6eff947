"""Source to artifact, one module a language.

`build_kernel` is the way in for a bare kernel (C++); the `module` form builds inside its runner, where the
module itself calls the compiler (`load_inline`, Triton's JIT), under the hooks of `sandbox.build.cuda` and
`sandbox.build.triton`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class BuildFailed(RuntimeError):
    """The compiler refused the candidate; the text is the compiler's."""


class BuildUnavailable(RuntimeError):
    """The machine cannot build now: no compiler, a full disk. Never the candidate's fault; the text says
    what to do."""


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A built library. `cached` is True when it was there already."""

    path: Path
    key: str
    cached: bool
    seconds: float
