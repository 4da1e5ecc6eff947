"""Skills that are refused whatever they would earn: those that tell the model not to write a kernel, or to
cheat.

A skill must teach how to write a faster kernel. One that says "call torch.matmul instead" would bring the
judged work back into the framework, one that says "cache the output between calls" would attack the judge.
The sandbox catches such candidates; this keeps the advice out of the library and out of every later prompt.
The rules read sentences, not code
semantics: they are a first gate, and verification by measured kernels is the second.
"""

from __future__ import annotations

import re

# Names under torch. and at:: that allocate, describe or register, and do none of a task's work.
_HARMLESS = (
    r"(?:empty|zeros|ones|full|tensor|float|double|half|bfloat|int|long|bool|uint|cuda|cpu|device|dtype|nn\.module"
    r"|nn\.parameter|utils|library|jit|manual_seed|contiguous|stride|arange|no_grad|inference_mode|extension)"
)
_TARGET = (
    rf"(?:torch\.(?!{_HARMLESS})\w[\w.]*|\bf\.\w+|nn\.functional\b|at::(?!{_HARMLESS})\w+|torch\.compile"
    r"|\b(?:cublas|cudnn|onednn|mkl|openblas)\w*"
    r"|pytorch(?:'s)?\s+(?:[\w-]+\s+){0,2}?(?:ops?|operators?|implementations?|functions?|built-?ins?|eager|fallback)\b"
    r"|\bthe\s+(?:original|reference)\s+(?:model|implementation|module|code|forward)\b)"
)
_ADVISE = r"\b(?:use|call|invoke|delegate|defer|rely|fall\s*back|falling\s+back|dispatch|return|leave|hand|route|keep|just|simply)\b"
_DELEGATES = re.compile(rf"(?P<verb>{_ADVISE})(?:\W+[\w'-]+){{0,6}}?\W+{_TARGET}")
_REPLACES = re.compile(rf"\breplace\b.*\b(?:with|by)\W+(?:[\w'-]+\W+){{0,3}}?{_TARGET}")
_NEGATED = re.compile(
    r"(?:\bnot|n't|\bnever|\bavoids?|\bavoiding|\bwithout|\binstead\s+of|\brather\s+than|\bno\s+longer|\bunlike)"
    r"(?:\W+[\w'-]+){0,4}\W*$"
)
_NO_KERNEL = re.compile(
    r"\b(?:skip|avoid|bypass|omit|forgo|instead\s+of|rather\s+than|no\s+need|don't|do\s+not|never|without|not)\b"
    r"(?:\W+[\w'-]+){0,3}?\W+(?:writ\w+|implement\w*|author\w*)\W+"
    r"(?:(?:a|an|any|the|your|our|own|custom|new|actual|real|triton|cuda|gpu|c\+\+|cpp|hand-?written)\W+)*kernels?\b"
    r"(?!\W+(?:per|for|that|which|with|whose|in|on|where|when)\b)"
)
_CHEATS = (
    (r"\b(?:cache|memoi[sz]e|reuse|store|remember|replay)\b.*\b(?:outputs?|results?|answers?)\b.*\b(?:calls|invocations|trials|runs|last\s+call|previous\s+call)\b", "it reuses results between calls"),
    (r"\bdetect\w*\b.*\b(?:benchmark\w*|harness|judge|evaluator|sandbox|timing\s+loop|being\s+(?:timed|tested))\b", "it detects the judge"),
    (r"\b(?:monkey-?\s?patch|patch|override|overwrite|replace)\b.*\b(?:timers?|clocks?|synchroni[sz]e|allclose|comparison|comparator|tolerances?|perf_counter)\b", "it tampers with the judge"),
    (r"\bhard-?\s?cod\w+\b.*\b(?:outputs?|answers?|expected)\b", "it hard-codes answers"),
    (r"\btry\b.*\bexcept\b.*(?:\bfall|\btorch|\breference|\bpytorch)", "it falls back to the framework in an except block"),
    (r"\breturn\w*\b.*\b(?:input|zeros|constant)\b.*\b(?:unchanged|unmodified|to\s+pass|as\s+the\s+output)\b", "it returns something that was not computed"),
    (r"\b(?:sys\.exit|os\._exit)\b", "it ends the process"),
)  # fmt: skip
_CHEATS = tuple((re.compile(pattern), reason) for pattern, reason in _CHEATS)
_LIBRARY_CALL = re.compile(
    rf"torch\.(?!{_HARMLESS})[a-z][\w.]*\s*\(|\bf\.[a-z]\w*\s*\(|at::(?!{_HARMLESS})\w+\s*\("
)
_KERNEL_CODE = re.compile(
    r'@triton|\btl\.|__global__|extern\s+"c"|#pragma|\bfor\s*\(|\bload_inline\b|<<<|_mm\d*_|__restrict__|\[grid\]'
)
_SENTENCE = re.compile(r"[.!?;:](?=\s|$)|\n")


def _sentences(text: str) -> list[str]:
    return [part.strip() for part in _SENTENCE.split(text) if part.strip()]


def refusal(description: str, content: str, *, key_idea: str, example: str) -> str:
    """Why a skill must be refused, or "" if nothing speaks against it.

    Args:
        description: the skill's one-line description.
        content: its whole text.
        key_idea, example: those sections of it. What the framework does may be told in the motivation; only
            advice counts.
    """
    for sentence in _sentences(f"{description}\n{content}".lower()):
        if _NO_KERNEL.search(sentence):
            return f'tells the model to bypass writing kernels: "{sentence[:80]}"'
        for pattern, reason in _CHEATS:
            if pattern.search(sentence):
                return f'{reason}: "{sentence[:80]}"'
    for sentence in _sentences(f"{description}\n{key_idea}".lower()):
        found = _DELEGATES.search(sentence)
        if (found and not _NEGATED.search(sentence[: found.start("verb")])) or _REPLACES.search(sentence):
            return f'tells the model to leave the work to a library: "{sentence[:80]}"'
    code = example.lower()
    if _LIBRARY_CALL.search(code) and not _KERNEL_CODE.search(code):
        return "tells the model to bypass writing kernels: its example holds library calls and no kernel code"
    return ""
