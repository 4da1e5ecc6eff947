"""The leanest way to build a `load_inline` source: a small header of our own in the place of PyTorch's.

`lean/lean.h` declares what kernels' host code uses of PyTorch's C++ interface over the C functions of `lean/abi.h`, and is parsed in a
tenth of a second, where PyTorch's own takes nvcc half a minute. What stands behind these functions is compiled once for an
installation of PyTorch (`lean/support.cpp`) and linked into every extension. What the header lacks does not compile;
`may_differ` tells an error that says nothing about the candidate from one in its own lines.

Under the store's `extension-lean`, published whole by one rename:

    <key>/include/...   the header, under its own name and those of PyTorch's headers, and one in the place of CUB's umbrella (`cub.py`)
    <key>/include/torch/extension.h.gch/...   the header, precompiled for what binding units are mostly compiled with
    <key>/support.o, and support_cuda.o where there is CUDA; or <key>/problem.txt: why they do not compile here
    <key>/stubs/lib*.so  libraries without a symbol, under the names of PyTorch's: the linker need not read those, whose symbols are
                         looked up when the extension is loaded in any case
"""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sandbox.build.artifacts import ArtifactStore, published_whole
from sandbox.build.cub import UMBRELLA, umbrella
from sandbox.build.cuda import host_flags
from sandbox.build.extension import BINDING_UNIT, ExtensionRequest
from sandbox.build.headers import BASE_FLAGS, PREPARE_S, Headers
from sandbox.build.locks import build_lock
from sandbox.build.toolchain import Cuda, Toolchain
from sandbox.jail.spawn import Zygote

log = logging.getLogger("sandbox.build")
PROBLEM = "problem.txt"
PRECOMPILED = "include/torch/extension.h.gch"
"""Where GCC looks for what it may take in the header's place."""
SOURCES = Path(__file__).with_name("lean")
STANDS_FOR = (
    "torch/extension.h", "torch/types.h", "torch/torch.h", "torch/all.h", "torch/script.h", "ATen/ATen.h", "ATen/Dispatch.h",
    "ATen/Parallel.h", "ATen/AccumulateType.h", "ATen/OpMathType.h", "c10/util/Exception.h", "c10/core/ScalarType.h", "c10/util/Optional.h",
    "ATen/cuda/CUDAContext.h", "ATen/cuda/Exceptions.h", "c10/cuda/CUDAStream.h", "c10/cuda/CUDAGuard.h", "c10/cuda/CUDAException.h",
    "c10/cuda/CUDAFunctions.h", "ATen/cuda/CUDAEvent.h",
)  # fmt: skip
"""PyTorch's headers in whose place ours stands."""
BINDS = """#if !defined(__CUDACC__) || defined(SANDBOX_LEAN_BINDS)
#include <torch/sandbox_binding.h>
#endif
"""
"""Before the source, or a brace that it leaves open would be said of every header that the binding needs."""
FORMS = ((), ("-DSANDBOX_LEAN_LIGHT",), ("-DSANDBOX_LEAN_LIGHT", "-DSANDBOX_LEAN_SHORT"))
"""Of the header: whole, light, and light with the 16-bit element types."""
LIBRARIES = ("c10", "c10_cuda", "torch_cpu", "torch_cuda", "torch", "torch_python")
"""PyTorch's, which every extension is linked to; a build of it for CPUs lacks two."""
_LIBRARY = re.compile(
    r"sandbox_lean|sandbox_binding::|\b(torch|at(?! (?:line|end)\b)|c10|caffe2|aten)\b|\bTensor|\b(AT|TORCH|C10|CAFFE|CUDA)_[A-Z_]+"
    r"|No such file|cannot open source"
)
_LIGHT = frozenset(
    "abs acos array asin atan atan2 cbrt ceil conditional_t copysign cos cosh decay_t declval enable_if_t erf erfc exp exp2 expm1 fabs "
    "false_type floor fma fmax fmin fmod forward get hypot initializer_list int16_t int32_t int64_t int8_t integral_constant invoke_result_t "
    "is_arithmetic_v is_floating_point is_floating_point_v is_integral is_integral_v is_same is_same_v isfinite isinf isnan ldexp log log10 "
    "log1p log2 lround make_pair make_tuple max min move nearbyint nullopt nullopt_t numeric_limits optional pair pow ptrdiff_t "
    "remove_const_t remove_cv_t remove_reference_t rint round rsqrt sin sinh size_t sqrt swap tan tanh tie tgamma true_type trunc tuple "
    "tuple_element_t tuple_size_v uint16_t uint32_t uint64_t uint8_t uintptr_t vector void_t".split()
)
"""Names of the standard library that the light form of the header brings along."""
_STANDARD = re.compile(r"\bstd\s*::\s*(\w+)")
_HEAVY = re.compile(r"using\s+namespace\s+std\b|\bc?str\s*\(")
_SHORT_FLOATS = re.compile(r"(?<!\bk)(Half|BFloat16)\b|_HALF\b|_REDUCED_")
"""PyTorch's own 16-bit types."""
_CUDAS_SHORT_FLOATS = {
    re.compile(r"__half|\bhalf2?\b"): re.compile(r"#\s*include\s*[<\"](?:cuda_fp16|cuda_bf16|mma)\."),
    re.compile(r"bfloat16"): re.compile(r"#\s*include\s*[<\"](?:cuda_bf16|mma)\."),
}
"""Words for CUDA's own 16-bit types, and what a source includes that does not leave it to PyTorch's header to bring them along."""
_VARIABLE = re.compile(r"\b(?:int|unsigned|long|size_t|u?int(?:32|64)_t|auto|float|double)\s+half\b")
"""Half of something, not a number of 16 bits."""
_NO_MEMBER = re.compile(
    r"namespace \"(?:torch|at|c10)\" has no member \"(\w+)\"|class \"sandbox_lean::\w+\" has no member \"(\w+)\""
    r"|['\u2018](\w+)['\u2019] is not a member of ['\u2018](?:torch|at|c10)['\u2019]"
    r"|['\u2018](?:class |struct )?sandbox_lean::\w+['\u2019] has no member named ['\u2018](\w+)['\u2019]"
)
_TWICE = re.compile(r"redefinition of .PyObject\* PyInit_|multiple definition of .PyInit_")
_HOST_ERROR = re.compile(r"^[^\s:(]+:\d+:\d+: (?:fatal )?error: .*", re.MULTILINE)
_UNDECLARED = re.compile(rf"{re.escape(BINDING_UNIT)}:\d+:\d+: error: ['\u2018](\w+)['\u2019] was not declared in this scope")
DISPATCH_OF_TYPE = "dispatch macros take x.scalar_type(), not x.type()"
"""Of the header's words for it (`lean/dispatch.h`)."""
_INCLUDES = re.compile(r"#\s*include\s*[<\"]((?:torch|ATen|c10|caffe2)/[^>\"]+)")
_USING = re.compile(r"using\s+namespace\s+(::)?\s*(torch|at|c10)\b")
_ERROR = re.compile(r"\berror\b|undefined reference|undefined symbol")


@dataclass(frozen=True)
class Lean:
    """The road's directory: what to put first on the include path, what to link, and the libraries without symbols."""

    include: Path
    objects: tuple[Path, ...]
    stubs: Path


def is_light(request: ExtensionRequest) -> bool:
    """Whether the light form of the header will do, which takes nvcc a third of the time: without the standard library's strings and
    streams."""
    return not _HEAVY.search(request.text) and _LIGHT.issuperset(_STANDARD.findall(request.text))


def has_short_floats(request: ExtensionRequest) -> bool:
    """Whether the light form needs the 16-bit element types besides, which take as long as all the rest of it."""
    text = request.text if not _VARIABLE.search(request.text) else re.sub(r"\bhalf\b", " ", request.text)
    left_to_us = any(words.search(text) and not header.search(text) for words, header in _CUDAS_SHORT_FLOATS.items())
    return left_to_us or bool(_SHORT_FLOATS.search(text))


class LeanRoad:
    """The directories of one store. Safe for several processes at once.

    Args:
      store, toolchain, scratch, pause: as for `Headers`.
      headers: gives the include path and runs compilers.
    """

    def __init__(
        self, store: ArtifactStore, toolchain: Toolchain, scratch: Path, pause: Callable[[float], None], headers: Headers
    ):
        self.root = store.root / "extension-lean"
        self._toolchain, self._scratch, self._pause, self._headers = toolchain, scratch, pause, headers
        self.problem: str | None = None
        """Why the road was not there when it was last asked for."""

    @property
    def identity(self) -> str:
        """What a key must contain of the road's own text."""
        return ArtifactStore.key(*(path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".h", ".cpp")), umbrella())

    def takes(self, request: ExtensionRequest) -> bool:
        """Whether the road may be tried: there are functions to be bound, and nothing is asked for by name that it has not."""
        by_us = bool(request.functions) and not request.needs_plain_road
        return by_us or (request.python_module and request.has_simple_module)

    def prepare(self, cuda: Cuda | None, zygote: Zygote) -> Lean | None:
        """The directory, made at the first call; None where the support library does not compile (another PyTorch), with the reason
        in `problem`. What failed for want of time or memory is tried again at the next call.

        Raises:
          OSError: no space on the disk.
        """
        parts = ["lean road 1", self.identity, self._toolchain.identity, cuda.identity if cuda else ""]
        directory = self.root / ArtifactStore.key(*parts)
        self.problem = None
        if not directory.exists():
            with build_lock(self.root / "locks" / directory.name, PREPARE_S, self._pause):
                if not directory.exists():
                    self._make(directory, cuda, zygote)
        if self.problem is None and (directory / PROBLEM).exists():
            self.problem = (directory / PROBLEM).read_text()
        return None if self.problem else Lean(directory / "include", tuple(sorted(directory.glob("*.o"))), directory / "stubs")

    def _make(self, target: Path, cuda: Cuda | None, zygote: Zygote) -> None:
        """Publishes `target`, or sets `problem`."""
        units = ["support", *(["support_cuda"] if cuda else [])]
        work, made = (Path(tempfile.mkdtemp(prefix=f"lean-{what}-", dir=self._scratch)) for what in ("work", "made"))
        try:
            for path in SOURCES.iterdir():
                if path.suffix in (".h", ".cpp"):
                    shutil.copyfile(path, work / path.name)
            self._write_headers(work / "include")
            (work / PRECOMPILED).mkdir()
            (work / "stubs").mkdir()
            script = self._script(units, cuda)

            def collect() -> None:
                for unit in units:
                    shutil.copyfile(work / f"{unit}.o", made / f"{unit}.o")
                for name in (PRECOMPILED, "stubs"):
                    (made / name).mkdir(parents=True)
                    for path in (work / name).iterdir():
                        shutil.copyfile(path, made / name / path.name)

            failed = self._headers.run(script, work, zygote, collect)
            if failed is not None:
                self.problem = failed.why
                log.warning("the lean road's support library does not compile, builds are slower: %s", failed.why)
                if failed.passing:
                    return
                (made / PROBLEM).write_text(failed.why)
            with published_whole(target) as staged:
                self._write_headers(staged / "include")
                shutil.copytree(made, staged, dirs_exist_ok=True)
        finally:
            for directory in (work, made):
                shutil.rmtree(directory, ignore_errors=True)

    def _script(self, units: list[str], cuda: Cuda | None) -> str:
        """Shell commands: all compilers at once; of the support library they must succeed."""
        includes = self._headers.include_flags() + (["-isystem", str(cuda.home / "include")] if cuda else [])
        compiler = [self._toolchain.compiler.path, *BASE_FLAGS]
        lines = [f"{shlex.join([*compiler, '-O2', *includes, '-c', f'{unit}.cpp', '-o', f'{unit}.o'])} & p{n}=$!" for n, unit in enumerate(units)]
        # A header that was precompiled at -O2 serves at -O1 and -O3 too; the compiler takes the one that fits, or the text.
        said = ["-DSANDBOX_LEAN", *(["-DSANDBOX_LEAN_CUDA", *host_flags([])] if cuda else [])]
        for n, flags in enumerate((*form, *level) for form in FORMS for level in ([], ["-O2"])):
            command = [*compiler, *said, *flags, "-Iinclude", *includes, "-x", "c++-header", "include/torch/extension.h"]
            lines.append(f"{shlex.join([*command, '-o', f'{PRECOMPILED}/{n}.gch'])} >/dev/null 2>&1 &")
        for name in LIBRARIES:
            real = shlex.quote(str(self._toolchain.libraries / f"lib{name}.so"))
            stub = shlex.join([*compiler, "-shared", "-nostdlib", "-x", "c++", "/dev/null", "-o", f"stubs/lib{name}.so"])
            lines.append(f"called=$(objdump -p {real} 2>/dev/null | sed -n 's/^ *SONAME *//p')")
            lines.append(f'[ -n "$called" ] && {stub} -Wl,-soname,"$called"')
        return "\n".join([*lines, *(f"wait $p{n} || exit 1" for n in range(len(units))), "wait", "exit 0"])

    def _write_headers(self, include: Path) -> None:
        own = include / "sandbox_lean"
        own.mkdir(parents=True)
        for path in SOURCES.glob("*.h"):
            shutil.copyfile(path, own / path.name)
        for name in STANDS_FOR:
            (include / name).parent.mkdir(parents=True, exist_ok=True)
            (include / name).write_text('#include "sandbox_lean/lean.h"\n' + (BINDS if name == "torch/extension.h" else ""))
        (include / UMBRELLA).parent.mkdir()
        (include / UMBRELLA).write_text(umbrella())
        self._headers.write_binding(include / "torch" / "sandbox_binding.h")


def may_differ(request: ExtensionRequest, log: str) -> bool:
    """Whether an error on this road says nothing about the candidate: it has to do with PyTorch's interface, of which the header
    has a part."""
    errors = [line for line in log.splitlines() if _ERROR.search(line)]
    return not errors or bool(_USING.search(request.text)) or any(_LIBRARY.search(line) for line in errors)


def hopeless(request: ExtensionRequest, log: str) -> bool:
    """Whether every road ends in one of the errors: there are two modules of one name, a dispatch macro is given x.type(), or, where the
    host's sources are fine otherwise, a function that is to be bound is not declared in them."""
    if _TWICE.search(log) or DISPATCH_OF_TYPE in log:
        return True
    names = {name for name, _ in request.functions or ()}
    errors = _HOST_ERROR.findall(log)
    unbound = [match for error in errors if (match := _UNDECLARED.match(error)) and match.group(1) in names]
    return bool(unbound) and len(unbound) == len(errors) and not re.search(r"\busing\s+namespace\b", request.text)


def missing_members(request: ExtensionRequest, log: str) -> set[str]:
    """The names that a source expects of PyTorch and the lean header has not, where nothing else is wrong with it; empty otherwise, and
    where the source includes other headers of PyTorch's, which may declare anything."""
    errors = [line for line in log.splitlines() if re.search(r"\berror\b.*:|\berror:", line)]
    found = [match for line in errors if (match := _NO_MEMBER.search(line))]
    others = {name for name in _INCLUDES.findall(request.text) if name not in STANDS_FOR}
    if not errors or len(found) < len(errors) or others or _USING.search(request.text):
        return set()
    return {next(filter(None, match.groups())) for match in found}


def in_pytorchs_words(log: str) -> str:
    """An error's text with PyTorch's names for what it is about."""
    return log.replace("sandbox_lean::", "at::")
