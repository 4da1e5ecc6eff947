"""Skills that are refused whatever they would earn: advice not to write a kernel, or to cheat.

A skill must teach how to write a faster kernel. One that says "call torch.matmul instead" would bring the
judged work back into the framework, one that says "cache the output between calls" would attack the judge.
The sandbox catches such candidates; this keeps the advice out of the library and out of every later prompt.
The rules read sentences, not code semantics: they are a first gate, and verification by measured kernels is
the second.
"""

from __future__ import annotations

import re

# Names under torch. and at:: that allocate, describe or register, and do none of a task's work.
_HARMLESS = (
    r"(?:empty|zeros|ones|full|tensor(?!dot)|float|double|half|bfloat|int|long|bool|uint|cuda|cpu|device|dtype"
    r"|nn\.module|nn\.parameter|utils|library|manual_seed|contiguous|stride|arange|no_grad|inference_mode)"
)
_LIBRARY = (
    rf"(?:torch\.(?!{_HARMLESS})\w[\w.]*|\bf\.[a-z]\w+|nn\.functional\b|at::(?!{_HARMLESS})\w+"
    r"|\b(?:cublas|cudnn|onednn|mkl|openblas)\w*"
    r"|pytorch(?:'s)?\s+(?:\w+\s+){0,2}?(?:ops?|operators?|implementations?|functions?|built-?ins?|eager|fallback)\b)"
)
_REFERENCE = r"\bthe\s+(?:original|reference)\s+(?:model|implementation|module|code|forward)\b"
_DELEGATE = r"call|invoke|delegate|defer|rely|fall\s*back|falling\s+back|dispatch|return|run|execute|import"
_ADVICE = (
    re.compile(
        rf"\b(?P<verb>{_DELEGATE}|use|leave|hand|route|keep|just|simply)\b(?P<gap>(?:\W+\w+){{0,6}}?\W+){_LIBRARY}"
    ),
    re.compile(rf"\b(?P<verb>{_DELEGATE})\b(?P<gap>(?:\W+\w+){{0,4}}?\W+){_REFERENCE}"),
    re.compile(rf"\b(?P<verb>replace)\b(?P<gap>.*)\b(?:with|by)\W+(?:\w+\W+){{0,3}}?{_LIBRARY}"),
)
# "do not call torch.add", "one loop instead of torch.add", "fewer passes than PyTorch eager": advice against
# the library.
_NEGATED_BEFORE = re.compile(
    r"(?:\bnot|n't|\bnever|\bavoid\w*|\bwithout|\binstead\s+of|\brather\s+than|\bno\s+longer|\bunlike)"
    r"(?:\W+\w+){0,4}\W*$"
)
_NEGATED_BETWEEN = re.compile(
    r"\b(?:than|like|as|unlike|versus|vs|instead|rather|not|never|without|match\w*)\b"
)
_NO_KERNEL = re.compile(
    r"\b(?:skip|avoid|bypass|omit|forgo|instead\s+of|rather\s+than|no\s+need|don't|do\s+not|never|without|not)\b"
    r"(?:\W+\w+){0,3}?\W+(?:writ\w+|implement\w*|author\w*)\W+"
    r"(?:(?:a|an|any|the|your|our|own|custom|new|actual|real|triton|cuda|gpu|cpp|hand|written)\W+)*kernels?\b"
    r"(?!\W+(?:per|for|that|which|with|whose|in|on|where|when)\b)"
)
_CHEATS = tuple(
    (re.compile(pattern), reason)
    for reason, pattern in {
        "reuses results between calls": (
            r"\b(?:cache|memoi[sz]e|reuse|store|remember|replay)\b"
            r".*\b(?<!partial )(?<!intermediate )(?:outputs?|results?|answers?)\b"
            r".*\b(?:calls|invocations|trials|runs|(?:last|previous|earlier)\s+call)\b"
        ),
        "detects the judge": (
            r"\bdetect\w*\b.*\b(?:benchmark\w*|harness|judge|evaluator|sandbox|timing\s+loop|being\s+(?:timed|tested))\b"
        ),
        "tampers with the judge": (
            r"\b(?:monkey-?\s?patch|patch|override|overwrite)\b.*\b(?:synchroni[sz]e|comparison|clocks?)\b"
            r"|\b(?:patch|override|overwrite|replace)\b.*\b(?:timers?|allclose|comparator|tolerances?|perf_counter)\b"
        ),
        "hard-codes answers": r"\bhard-?\s?cod\w+\b.*\b(?:outputs?|answers?|expected)\b",
        "returns what was not computed": (
            r"\breturn\w*\b.*\b(?:input|zeros|constant)\b.*\b(?:unchanged|unmodified|to\s+pass|as\s+the\s+output)\b"
        ),
        "ends the process": r"\b(?:sys\.exit|os\._exit)\b",
    }.items()
)
# Runs over several lines of code, so it is looked for in the whole text.
_EXCEPT_FALLBACK = re.compile(
    r"\btry\b.{0,200}?\bexcept\b.{0,100}?\b(?:fall(?:s|ing)?\s*back|torch|reference|pytorch)\b", re.DOTALL
)
_LIBRARY_CALL = re.compile(
    rf"torch\.(?!{_HARMLESS})[a-z][\w.]*\s*\(|\bf\.[a-z]\w*\s*\(|at::(?!{_HARMLESS})\w+\s*\("
)
_KERNEL_CODE = re.compile(
    r'@triton|\btl\.|__global__|extern\s+"c"|#pragma|\bfor\s*\(|\bload_inline\b|<<<|_mm\d*_|__restrict__|\[grid\]'
)
_SENTENCE = re.compile(r"[.!?;:](?=\s|$)|\n")
# The patterns take up to cubic time in a sentence's length, and a model wrote it: long ones are read in
# pieces.
_MAX_SENTENCE_CHARS = 300


def _sentences(text: str) -> list[str]:
    parts = [part.strip() for part in _SENTENCE.split(text.lower())]
    size = _MAX_SENTENCE_CHARS
    return [part[i : i + size] for part in parts for i in range(0, len(part), size)]


def _advises_library(sentence: str) -> bool:
    return any(
        not _NEGATED_BEFORE.search(sentence[: match.start("verb")])
        and not _NEGATED_BETWEEN.search(match["gap"])
        for pattern in _ADVICE
        for match in pattern.finditer(sentence)
    )


def refusal(description: str, content: str, *, key_idea: str, example: str) -> str:
    """Why a skill must be refused ("it ..."), or "" if nothing speaks against it.

    Args:
        description: the skill's one-line description.
        content: its whole text.
        key_idea, example: those sections of it. What the framework does may be told in the motivation; only
            advice counts.
    """
    for sentence in _sentences(f"{description}\n{content}"):
        if _NO_KERNEL.search(sentence):
            return f'it tells the model to bypass writing kernels: "{sentence[:80]}"'
        for pattern, reason in _CHEATS:
            if pattern.search(sentence):
                return f'it {reason}: "{sentence[:80]}"'
    if found := _EXCEPT_FALLBACK.search(content.lower()):
        return f'it falls back to the framework when the kernel fails: "{found.group()[:80]}"'
    for sentence in _sentences(f"{description}\n{key_idea}"):
        if _advises_library(sentence):
            return f'it tells the model to leave the work to a library: "{sentence[:80]}"'
    code = example.lower()
    if _LIBRARY_CALL.search(code) and not _KERNEL_CODE.search(code):
        return (
            "it tells the model to bypass writing kernels: its example holds library calls and no kernel code"
        )
    return ""
