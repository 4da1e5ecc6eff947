"""Source to artifact, one module a language.

`cpp.build_kernel` is the way in for a bare kernel (C++), `roads.ExtensionBuilder` for what a module asks for with
`load_inline` (C++ and CUDA); both compile in a jail of their own. Triton's JIT compiles in the module's own runner,
under the hooks of `sandbox.build.triton` or, where there is no GPU, `sandbox.build.triton_interpreter`.
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
