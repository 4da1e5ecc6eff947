"""What a candidate asks for when it calls `load_inline` or `load`: checked data, its key, and the texts to
compile.

A request comes from untrusted code. `parse_request` bounds and checks it; nothing in it is a path or reaches
a shell.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sandbox.build.flags import FlagRefused, check_cpp, check_cuda, check_link
from sandbox.protocol import MAX_SOURCE_BYTES

MAX_ENTRIES = 64
MAX_FUNCTIONS = 256
MAX_DOC_CHARS = 500
MAX_NAME_CHARS = 60
_NAME = re.compile(r"[A-Za-z_]\w{0,99}")
_FUNCTION = re.compile(r"[A-Za-z_:][\w:<>,* ]*")  # flat: nested repetitions would try every way to share out a text
_FILE = re.compile(r"[A-Za-z0-9_][\w.+-]{0,99}")
_SPELLED_NAME = re.compile(r"PYBIND11_MODULE\s*\(\s*(?!TORCH_EXTENSION_NAME\b)\w+|\bTORCH_LIBRARY|\bPyInit_")
_NEEDS_PLAIN = re.compile(
    r"\bpy\s*::|\bpybind11\b|\bPYBIND11_|\btorch::(nn|jit|optim|data|serialize)\b"
    r"|#\s*include\s*[<\"](torch/(?!extension\.h|types\.h|library\.h)|pybind11/)"
)
_MODULE = re.compile(r"\bPYBIND11_MODULE\b")
_DEF = re.compile(r"\bdef\s*\((?:\s*\"(\w+)\"\s*,)?")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
BINDING_UNIT, CUDA_UNIT = "sandbox_binding.cpp", "sandbox_cuda.cu"
CPP_SUFFIXES = (".cpp", ".cc", ".cxx")
CUDA_SUFFIXES = (".cu",)


class RequestRefused(ValueError):
    """A request that will not be built; the text says why, and is fit for a person."""


@dataclass(frozen=True, kw_only=True)
class ExtensionRequest:
    """One extension.

    Attributes:
      name: as the candidate calls it; the compiler sees it only where `keeps_name` is true.
      cpp, cuda: `load_inline`'s sources, which become one main.cpp and one cuda.cu.
      files: `load`'s sources by file name, each a translation unit of its own.
      functions: names and docstrings to bind, or None where the sources bind by themselves.
      python_module: import it; otherwise it is a library that registers operators.
      torch_errors: exceptions are translated by PyTorch, not by pybind11.
      implicit_headers: PyTorch's headers are put before the sources.
    """

    name: str
    cpp: tuple[str, ...] = ()
    cuda: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    functions: tuple[tuple[str, str], ...] | None = None
    cflags: tuple[str, ...] = ()
    cuda_flags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    with_cuda: bool = False
    python_module: bool = True
    torch_errors: bool = True
    implicit_headers: bool = True
    text: str = field(init=False, repr=False, compare=False)
    """All sources without comments, for looking things up."""

    def __post_init__(self) -> None:
        whole = "\n".join([*self.cpp, *self.cuda, *(text for _, text in self.files)])
        object.__setattr__(self, "text", _COMMENT.sub(" ", whole))

    @property
    def keeps_name(self) -> bool:
        """Whether the compiled code depends on the extension's name."""
        return not self.functions or bool(_SPELLED_NAME.search(self.text))

    @property
    def needs_plain_road(self) -> bool:
        """Whether the sources ask by name for what only PyTorch's own headers and pybind11 give."""
        return not self.torch_errors or bool(_NEEDS_PLAIN.search(self.text))

    @property
    def has_simple_module(self) -> bool:
        """Whether all that the sources ask for by name is a PYBIND11_MODULE that binds functions, each under a literal of its own: so
        that none of them is another one's overload."""
        names = _DEF.findall(self.text)
        simple = bool(names) and all(names) and len(set(names)) == len(names) and self.torch_errors
        text, modules = _MODULE.subn(" ", self.text)
        return simple and modules == 1 and not _NEEDS_PLAIN.search(text)

    @property
    def binds_in_cuda(self) -> bool:
        """Whether a PYBIND11_MODULE is in the CUDA sources."""
        sources = (*self.cuda, *(text for name, text in self.files if name.endswith(CUDA_SUFFIXES)))
        return any(_MODULE.search(text) for text in sources)

    def key(self, *identity: str) -> str:
        """The content address: what the compiler sees, with `identity` of the tools; not the name, unless it
        is seen."""
        seen = [
            self.cpp,
            self.cuda,
            self.files,
            self.functions,
            self.cflags,
            self.cuda_flags,
            self.ldflags,
            self.with_cuda,
            self.python_module,
            self.torch_errors,
            self.implicit_headers,
            self.name if self.keeps_name else "",
        ]
        return hashlib.sha256(json.dumps([seen, identity]).encode()).hexdigest()

    def module_name(self, key: str) -> str:
        """The name that it is built under."""
        return self.name if self.keeps_name else f"ext_{key[:24]}"

    def units(self, module: str, *, fast: bool) -> dict[str, str]:
        """Files to write, by name: first the sources, then (see `compiled`) what includes and binds them."""
        if self.files:
            return dict(self.files)
        texts = _named("main", ".cpp", self.cpp) | _named("cuda", ".cu", self.cuda)
        cpp = "#include <torch/extension.h>\n" if self.implicit_headers else ""
        cpp += "".join(f'#include "{name}"\n' for name in texts if name.endswith(".cpp"))
        if self.functions:
            bind = _fast_binding if fast else _pybind_binding
            cpp += bind(self.functions, module, self.torch_errors)
        texts[BINDING_UNIT] = cpp
        if self.cuda:
            headers = "#include <torch/types.h>\n#include <cuda.h>\n#include <cuda_runtime.h>\n"
            texts[CUDA_UNIT] = (headers if self.implicit_headers else "") + "".join(
                f'#include "{name}"\n' for name in texts if name.endswith(".cu")
            )
        return texts

    @property
    def compiled(self) -> list[str]:
        """Names of the translation units among `units`."""
        if self.files:
            return [name for name, _ in self.files]
        return [BINDING_UNIT, *([CUDA_UNIT] if self.cuda else [])]


def shown(name: Any) -> str:
    """A name that a candidate has chosen, as it may stand in a result: short, and plain ASCII whatever it was."""
    return ascii(name[:MAX_NAME_CHARS])[1:-1] if isinstance(name, str) else f"<{type(name).__name__}>"


def parse_request(data: dict[str, Any]) -> ExtensionRequest:
    """Reads what the stub in a runner sent.

    Raises:
      RequestRefused: too large, of the wrong form, or with a name or flag that is not allowed.
    """
    name = data.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestRefused(f"name '{shown(name)}': an extension is named by an identifier")
    cpp, cuda = _texts(data, "cpp_sources"), _texts(data, "cuda_sources")
    files = _files(data.get("files") or [])
    if not (cpp or cuda or files):
        raise RequestRefused("there are no sources")
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in [*cpp, *cuda, *(t for _, t in files)])
    if size > MAX_SOURCE_BYTES:
        raise RequestRefused(f"sources have {size} bytes, the limit is {MAX_SOURCE_BYTES}")
    if _texts(data, "extra_include_paths"):
        raise RequestRefused(
            "extra_include_paths: PyTorch's, Python's and CUDA's headers are found without; "
            "no other directory is read"
        )
    try:
        cflags = check_cpp(_texts(data, "extra_cflags"))
        cuda_flags = check_cuda(_texts(data, "extra_cuda_cflags"))
        ldflags = check_link(_texts(data, "extra_ldflags"))
    except FlagRefused as error:
        raise RequestRefused(str(error)) from error
    return ExtensionRequest(
        name=name,
        cpp=cpp,
        cuda=cuda,
        files=files,
        functions=_functions(data.get("functions")),
        cflags=tuple(cflags),
        cuda_flags=tuple(cuda_flags),
        ldflags=tuple(ldflags),
        with_cuda=bool(data.get("with_cuda"))
        or bool(cuda)
        or any(f.endswith(CUDA_SUFFIXES) for f, _ in files),
        python_module=data.get("is_python_module") is not False,
        torch_errors=data.get("with_pytorch_error_handling") is not False,
        implicit_headers=not files and data.get("no_implicit_headers") is not True,
    )


def _texts(data: dict[str, Any], field_name: str) -> tuple[str, ...]:
    value = data.get(field_name)
    values = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(text, str) for text in values):
        raise RequestRefused(f"{field_name}: a text or a list of texts is needed")
    if len(values) > MAX_ENTRIES:
        raise RequestRefused(f"{field_name}: at most {MAX_ENTRIES} entries")
    if any("\x00" in text for text in values):
        raise RequestRefused(f"{field_name}: contains a NUL character")
    return tuple(values)


def _files(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or len(value) > MAX_ENTRIES:
        raise RequestRefused(f"sources: at most {MAX_ENTRIES} files")
    found: dict[str, str] = {}
    for entry in value:
        if not (isinstance(entry, list) and len(entry) == 2 and all(isinstance(text, str) for text in entry)):
            raise RequestRefused("sources: pairs of a file's name and text are needed")
        file, text = entry
        if (
            not _FILE.fullmatch(file)
            or file in (BINDING_UNIT, CUDA_UNIT)
            or not file.endswith(CPP_SUFFIXES + CUDA_SUFFIXES)
            or "\x00" in text
        ):
            raise RequestRefused(
                f"source {file[:100]!r}: .cpp, .cc, .cxx and .cu files are built, by their plain names"
            )
        if file in found:
            raise RequestRefused(f"source {file!r} is given twice")
        found[file] = text
    return tuple(found.items())


def _functions(value: Any) -> tuple[tuple[str, str], ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        value = {name: name for name in value if isinstance(name, str)} if _all_texts(value) else None
    if not isinstance(value, dict) or not _all_texts(value.values()) or len(value) > MAX_FUNCTIONS:
        raise RequestRefused(
            f"functions: a list of at most {MAX_FUNCTIONS} names, or a dict with docstrings, is needed"
        )
    for name in value:
        if len(name) > 200 or not _FUNCTION.fullmatch(name) or name.count("<") != name.count(">"):
            raise RequestRefused(f"functions: {name[:100]!r} does not name a C++ function")
    return tuple((name, doc[:MAX_DOC_CHARS]) for name, doc in value.items())


def _all_texts(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _named(stem: str, suffix: str, texts: Sequence[str]) -> dict[str, str]:
    """Each source in a file of its own, so that the compiler quotes it by the candidate's own line
    numbers."""
    if len(texts) == 1:
        return {f"{stem}{suffix}": f"{texts[0]}\n"}
    return {f"{stem}_{number}{suffix}": f"{text}\n" for number, text in enumerate(texts)}


def _fast_binding(functions: Sequence[tuple[str, str]], module: str, torch_errors: bool) -> str:
    assert torch_errors
    entries = "".join(f"  SANDBOX_METHOD({_literal(n)}, {_literal(doc)}, {n}),\n" for n, doc in functions)
    return (
        "#include <torch/sandbox_binding.h>\nnamespace {\n"
        f"PyMethodDef sandbox_methods[] = {{\n{entries}  {{nullptr, nullptr, 0, nullptr}}}};\n"
        f'PyModuleDef sandbox_module = {{PyModuleDef_HEAD_INIT, "{module}", nullptr, -1, sandbox_methods, '
        "nullptr, nullptr, nullptr, nullptr};\n}\n"
        f"PyMODINIT_FUNC PyInit_{module}() {{ return PyModule_Create(&sandbox_module); }}\n"
    )


def _pybind_binding(functions: Sequence[tuple[str, str]], module: str, torch_errors: bool) -> str:
    lines = []
    for name, doc in functions:
        function = f"torch::wrap_pybind_function({name})" if torch_errors else name
        lines.append(f"  m.def({_literal(name)}, {function}, {_literal(doc)});\n")
    return f"PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{\n{''.join(lines)}}}\n"


def _literal(text: str) -> str:
    """A C string literal."""
    data = text.encode("utf-8", "replace")
    return (
        '"' + "".join(chr(b) if 32 <= b < 127 and chr(b) not in '"\\?' else f"\\{b:03o}" for b in data) + '"'
    )
