"""Which compiler flags a candidate may set: an allow-list, for what reads or writes files has no place in
it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence

MAX_FLAGS = 64
MAX_FLAG_CHARS = 300
_MACRO = r"[A-Za-z_]\w*(\([\w, ]*\))?(=[\w.+\-*/%()<>:, \"']*)?"
_ARCHES = r"(sm|compute)_\d+[af]?"


def _one_of(*patterns: str) -> str:
    return "|".join(f"(?:{pattern})" for pattern in patterns)


_CODE_GENERATION = _one_of(
    "fast-math|associative-math|finite-math-only|math-errno|reciprocal-math|rounding-math|signed-zeros",
    "trapping-math|unsafe-math-optimizations|cx-limited-range|fp-contract=(fast|on|off)|builtin",
    "unroll-loops|unroll-all-loops|peel-loops|split-loops|unswitch-loops|loop-[a-z-]+|tree-[a-z-]+|ivopts",
    "prefetch-loop-arrays|modulo-sched|schedule-insns2?|rename-registers|gcse|gcse-[a-z]+|ipa-[a-z-]+",
    "vect-cost-model=[a-z-]+|expensive-optimizations|inline|inline-functions|inline-limit=[0-9]+",
    "strict-aliasing|strict-overflow|wrapv|merge-constants|omit-frame-pointer|stack-protector|aligned-new",
    "align-(functions|loops|jumps)(=[0-9]+)?|exceptions|rtti|permissive|openmp|openmp-simd|PIC|pic",
    "visibility=(default|hidden)|visibility-inlines-hidden|max-errors=[0-9]+|diagnostics-color=[a-z]+",
)
_CPP = re.compile(
    _one_of(
        r"-O([0-3sg]|fast)?|-g[0-3]?|-w|-pedantic|-pthread|-pipe",
        r"--?std=(c|gnu)\+\+(11|14|17|1z|20|2a|23|2b)",
        r"-m(arch|tune|cpu)=[\w.+-]+|-mprefer-vector-width=(\d+|none)|-mfpmath=[a-z0-9,+]+",
        r"-m(no-)?(sse[\d.]*|ssse3|avx[\w.]*|fma|fma4|f16c|bmi2?|popcnt|lzcnt|mmx|aes|amx-\w+)",
        rf"-f(no-)?({_CODE_GENERATION})",
        r"-W[a-z][a-z0-9+-]*(=[0-9a-z]+)?|-Wall|-Wextra",
        rf"-D{_MACRO}|-U[A-Za-z_]\w*",
    )
)
_LINK = re.compile(
    _one_of(
        r"-l(m|c|dl|rt|pthread|gomp|stdc\+\+|c10|torch|torch_cpu|torch_python|c10_cuda|torch_cuda)",
        r"-l(cuda|cudart|cublas|cublasLt|cudnn|curand|cusparse|cusolver|cufft|nvrtc|nvToolsExt)",
        r"-fopenmp|-pthread|-s|-O[0-3]",
        r"-Wl,(--as-needed|--no-as-needed|-O[0-3]|--gc-sections|-z,now|-z,relro|-Bsymbolic)",
    )
)
_CUDA = re.compile(
    _one_of(
        r"-O[0-3]|-w|-Werror|-lineinfo|--generate-line-info|--?use_fast_math|--?restrict|-rdc=false",
        r"--?std=c\+\+(11|14|17|20)|--?(threads|t)=\d+|--?maxrregcount[= ]\d+",
        r"--?expt-(relaxed-constexpr|extended-lambda)|--?extended-lambda|--?extra-device-vectorization",
        rf"--?arch={_ARCHES}|--gpu-architecture={_ARCHES}",
        rf"--?gencode=arch=compute_\d+[af]?,code=\[?{_ARCHES}(,{_ARCHES})*\]?",
        r"--?(fmad|ftz|prec-div|prec-sqrt)=(true|false)|--?default-stream[= ](legacy|per-thread)",
        r"--?diag-suppress[= ]\d+(,\d+)*",
        rf"-D{_MACRO}|-U[A-Za-z_]\w*",
    )
)
_GENCODE = re.compile(rf"arch=compute_\d+[af]?,code=\[?{_ARCHES}(,{_ARCHES})*\]?")
_PTXAS = re.compile(
    r"-v|-{0,2}O[0-4]|-dlcm=(ca|cg|cv|cs)|-dscm=(wb|cg|cs|wt)|-{0,2}warn[\w-]*|-{0,2}maxrregcount=\d+"
    r"|--allow-expensive-optimizations=(true|false)|--verbose|--opt-level[= ]\d|-{1,2}def-load-cache=\w+"
)


_TWO_WORDS = frozenset(
    "-Xcompiler --compiler-options -Xptxas --ptxas-options -gencode --generate-code -arch --gpu-architecture "
    "-maxrregcount --maxrregcount".split()
)


class FlagRefused(ValueError):
    """A flag that is not on the list; the text names it."""


def check_cpp(flags: Sequence[str]) -> list[str]:
    """The flags for the C++ compiler, one a word. Raises FlagRefused."""
    return _check("extra_cflags", flags, _CPP.fullmatch)


def check_link(flags: Sequence[str]) -> list[str]:
    """The flags for the linker, one a word. Raises FlagRefused."""
    return _check("extra_ldflags", flags, _LINK.fullmatch)


def check_cuda(flags: Sequence[str]) -> list[str]:
    """The flags for nvcc, each option in one word. Raises FlagRefused."""
    joined: list[str] = []
    words = iter(_bounded("extra_cuda_cflags", flags))
    for word in words:
        if word in _TWO_WORDS:
            word = f"{word}={next(words, '')}"
        joined.append(word)
    return _check("extra_cuda_cflags", joined, _is_cuda)


def _is_cuda(flag: str) -> bool:
    name, equals, value = flag.partition("=")
    if equals and name in ("-Xcompiler", "--compiler-options"):
        return all(_CPP.fullmatch(part) for part in value.strip("'\"").split(","))
    if equals and name in ("-Xptxas", "--ptxas-options"):
        return all(_PTXAS.fullmatch(part) for part in value.strip("'\"").split(","))
    if equals and name == "--generate-code":
        return bool(_GENCODE.fullmatch(value))
    return bool(_CUDA.fullmatch(flag))


def _check(argument: str, flags: Iterable[str], allowed: Callable[[str], object]) -> list[str]:
    kept = _bounded(argument, flags)
    for flag in kept:
        if not allowed(flag):
            raise FlagRefused(
                f"{argument}: {flag[:100]!r} is not allowed here; flags that choose optimisation, the "
                "processor, the language standard, warnings and macros are"
            )
    return kept


def _bounded(argument: str, flags: Iterable[str]) -> list[str]:
    try:
        # PyTorch hands its list to a shell, so one entry may hold several flags.
        kept = [word for flag in flags for word in shlex.split(flag)]
    except ValueError as error:
        raise FlagRefused(f"{argument}: {error}") from error
    if len(kept) > MAX_FLAGS or any(len(flag) > MAX_FLAG_CHARS for flag in kept):
        raise FlagRefused(f"{argument}: at most {MAX_FLAGS} flags of {MAX_FLAG_CHARS} characters")
    return kept


_SHARED_BY_PCH = re.compile(
    _one_of(
        rf"-w|-W.*|-pedantic|-pipe|-D(?!NDEBUG\b){_MACRO}|-U.*|-f[pP][iI][cC]",
        r"-f(no-)?(unroll(-all)?-loops|tree-vectorize)|-fdiagnostics-color.*|-fmax-errors.*",
    )
)


def header_flags(flags: Sequence[str]) -> list[str]:
    """What of the C++ flags a precompiled header depends on, in a fixed order.

    GCC takes a header that was precompiled at one level of optimisation at another (but not at none), and
    whatever macros and warnings are set, as long as the header does not ask for the macro.
    """
    optimised = [flag for flag in flags if flag.startswith("-O")][-1:]
    level = ["-O2"] if optimised and optimised[0] in ("-O", "-O1", "-O2", "-O3") else optimised
    others = [flag for flag in flags if not flag.startswith("-O") and not _SHARED_BY_PCH.fullmatch(flag)]
    return [*level, *dict.fromkeys(others)]
