"""What is left of a source text without names, comments, white space and the spelling of constants, for Python, Triton, C++ and CUDA.

Sources are read, never executed.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_KEPT_METHODS = ("forward", "backward")
TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.]*|[^\s\w]")
OWN_NAME = re.compile(r"[acgv]\d+(?:_\d+)?")
_LOOKS_LIKE_C = re.compile(r"[;{}]\s*(?:\n|\Z)")


@functools.lru_cache(maxsize=1 << 15)
def normal_form(source: str) -> str:
    """A text that two sources share if they differ in names, comments, docstrings, type hints, imports, white space and the spelling of
    constants alone.

    Python is read as a syntax tree: names are numbered in the order in which their scope binds them (g of the module, v of a function, a
    of attributes of self), imported ones are written out in full, and a keyword of a call follows the parameter that it names. C++ and
    CUDA, alone or in strings of Python, are read as tokens: names that the text declares are numbered, those of its libraries stay. What
    is neither is taken as tokens.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings; it is not our source
            tree = ast.parse(source)
        return _Python(tree).text()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        if _LOOKS_LIKE_C.search(source):
            return _c_form(source, {})
        return " ".join(TOKEN.findall(re.sub(r"#[^\n]*", "", source)))


class _Python:
    """A module's tree with its names replaced.

    A first walk binds names to scopes, a second one writes them; in place, as the tree is nobody else's.
    """

    def __init__(self, tree: ast.Module):
        self._tree = tree
        self._locals: dict[ast.AST, list[str]] = {}
        self._attributes: dict[str, str] = {}
        self._imports: dict[str, str] = {}
        self._c_names: dict[str, str] = {}
        bound: dict[str, None] = {}
        for node in tree.body:
            self._bind(node, bound, None)
        self._globals = self._imports | {name: f"g{i}" for i, name in enumerate(bound)}
        self._parameters: dict[str, dict[str, str]] = {}
        self._strings: dict[str, str] = {}  # a kernel's parameters as launchers and configurations call them: meta["BLOCK"]
        for node in tree.body:
            if isinstance(node, _FUNCTIONS):
                own = {a.arg: f"v{i}" for i, a in enumerate(arguments_of(node.args))}
                self._parameters[node.name] = own
                if node.decorator_list:
                    self._strings = own | self._strings

    def text(self) -> str:
        self._tree.body = self._body(self._tree.body, self._globals, 0, None)
        return ast.unparse(self._tree)

    def _bind(self, node: ast.AST, names: dict[str, None], me: str | None) -> None:
        """Enters what is bound here into the scope's `names`, and opens the scopes inside; `me` is what self is called here."""
        kind = type(node)
        if kind is ast.Name:
            if type(node.ctx) is ast.Store:
                names.setdefault(node.id)
        elif kind is ast.Constant:
            if type(node.value) is str and _LOOKS_LIKE_C.search(node.value):
                _c_form(node.value, self._c_names)
        elif kind in _FUNCTIONS or kind is ast.Lambda:
            own = dict.fromkeys(a.arg for a in arguments_of(node.args))
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    self._bind(default, names, me)
            if kind is ast.Lambda:
                self._bind(node.body, own, me)
            else:
                names.setdefault(node.name)
                for inner in (*node.decorator_list, *node.body):
                    self._bind(inner, own, me)
            self._locals[node] = list(own)
        elif kind is ast.ClassDef:
            names.setdefault(node.name)
            for inner in node.body:
                method = isinstance(inner, _FUNCTIONS)
                if method and not inner.name.startswith("__") and inner.name not in _KEPT_METHODS:
                    self._attributes.setdefault(inner.name, f"a{len(self._attributes)}")
                self._bind(inner, {}, _first_argument(inner) if method else None)
        elif kind is ast.Import:
            for alias in node.names:
                self._imports[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else alias.name.partition(".")[0]
        elif kind is ast.ImportFrom:
            for alias in node.names:
                if _resolved(node):
                    self._imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        else:
            if kind is ast.Attribute and type(node.ctx) is ast.Store and type(node.value) is ast.Name and node.value.id == me:
                self._attributes.setdefault(node.attr, f"a{len(self._attributes)}")
            elif kind is ast.ExceptHandler and node.name:
                names.setdefault(node.name)
            for child in _children(node):
                self._bind(child, names, me)

    def _body(self, body: Sequence[ast.stmt], names: Mapping[str, str], depth: int, me: str | None, of_class: bool = False) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for node in body:
            kind = type(node)
            if kind is ast.Import or (kind is ast.ImportFrom and _resolved(node)) or (kind is ast.Expr and type(node.value) is ast.Constant):
                continue  # the last is a docstring
            if kind is ast.AnnAssign and not _is_constexpr(node.annotation):
                if node.value is None:
                    continue
                node = ast.Assign(targets=[node.target], value=node.value, lineno=node.lineno)
            self._write(node, names, depth, me, of_class)
            out.append(node)
        return out or [ast.Pass()]

    def _write(self, node: ast.AST, names: Mapping[str, str], depth: int, me: str | None, of_class: bool = False) -> None:
        kind = type(node)
        if kind is ast.Name:
            node.id = names.get(node.id, node.id)
        elif kind is ast.Constant:
            if type(node.value) is str:
                node.value, node.kind = self._string(node.value), None
        elif kind in _FUNCTIONS or kind is ast.Lambda:
            self._write_function(node, names, depth, me, of_class)
        elif kind is ast.ClassDef:
            node.name = names.get(node.name, node.name)
            for inner in (*node.bases, *node.keywords, *node.decorator_list):
                self._write(inner, names, depth, me)
            node.body = self._body(node.body, names, depth, None, of_class=True)
        elif kind is ast.Global or kind is ast.Nonlocal:
            node.names = [names.get(name, name) for name in node.names]
        else:
            if kind is ast.Attribute:
                of_self = me is not None and type(node.value) is ast.Name and node.value.id == me
                node.attr = (self._attributes if of_self else self._c_names).get(node.attr, node.attr)
            elif kind is ast.Call:
                self._rename_keywords(node)
            elif kind is ast.ExceptHandler:
                node.name = node.name and names.get(node.name, node.name)
            for field in _fields(kind):
                value = getattr(node, field, None)
                if value.__class__ is list and value and isinstance(value[0], ast.stmt):
                    setattr(node, field, self._body(value, names, depth, me))
                else:
                    for child in value if value.__class__ is list else (value,):
                        if isinstance(child, ast.AST):
                            self._write(child, names, depth, me)

    def _write_function(self, node, names: Mapping[str, str], depth: int, me: str | None, of_class: bool) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self._write(default, names, depth, me)
        prefix = f"v{depth}_" if depth else "v"
        inner = {**names, **{name: f"{prefix}{i}" for i, name in enumerate(self._locals[node])}}
        me = _first_argument(node) if of_class else me
        for argument in arguments_of(node.args):
            argument.arg = inner[argument.arg]
            argument.annotation = ast.Name("constexpr") if argument.annotation and _is_constexpr(argument.annotation) else None
        if type(node) is ast.Lambda:
            self._write(node.body, inner, depth + 1, me)
            return
        for decorator in node.decorator_list:
            self._write(decorator, names, depth, None)
        node.name = (self._attributes if of_class else names).get(node.name, node.name)
        node.returns = None
        node.body = self._body(node.body, inner, depth + 1, me)

    def _rename_keywords(self, node: ast.Call) -> None:
        called = node.func
        while type(called) is ast.Subscript:  # kernel[grid](...)
            called = called.value
        own = self._parameters.get(called.id, {}) if type(called) is ast.Name else {}
        extension = getattr(called, "attr", getattr(called, "id", "")) in ("load_inline", "load")
        for keyword in node.keywords:
            keyword.arg = own.get(keyword.arg, keyword.arg)
            if extension and keyword.arg == "name":
                keyword.value = ast.Constant("")  # of the extension: it names a file

    def _string(self, text: str) -> str:
        if _LOOKS_LIKE_C.search(text):
            return _c_form(text, self._c_names)
        return self._strings.get(text) or self._c_names.get(text, text)


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """Fields of a kind of node that hold nodes."""
    return tuple(f for f in kind._fields if f not in ("ctx", "id", "attr", "name", "names", "kind", "type_comment", "n", "s", "op", "ops"))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for field in _fields(type(node)):
        value = getattr(node, field, None)
        for child in value if value.__class__ is list else (value,):
            if isinstance(child, ast.AST):
                yield child


def arguments_of(a: ast.arguments) -> list[ast.arg]:
    return [*a.posonlyargs, *a.args, *([a.vararg] if a.vararg else []), *a.kwonlyargs, *([a.kwarg] if a.kwarg else [])]


def _first_argument(function: ast.FunctionDef) -> str | None:
    return function.args.args[0].arg if function.args.args else None


def _resolved(node: ast.ImportFrom) -> bool:
    return not node.level and node.names[0].name != "*"


def _is_constexpr(hint: ast.expr) -> bool:
    return getattr(hint, "attr", getattr(hint, "id", "")) == "constexpr"


_C_TOKEN = re.compile(
    r"(?P<skip>\s+|//[^\n]*|/\*.*?(?:\*/|\Z))|(?P<directive>^[^\S\n]*#[^\n]*)"
    r"""|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)"""
    r"|(?P<name>[A-Za-z_]\w*)|(?P<sign><<<|>>>|::|->|[^\s\w])",
    re.DOTALL | re.MULTILINE,
)
_C_NUMBER = re.compile(r"(0[xX][0-9a-fA-F]+|\d*\.?\d*(?:[eE][+-]?\d+)?)([a-zA-Z]*)")
_C_TYPE = re.compile(
    r"void|bool|auto|size_t|ptrdiff_t|dim3|Tensor|scalar_t|index_t|cuda\w+_t|u?int(?:8|16|32|64|ptr)_t|signed|unsigned|__half2?|__nv_bfloat162?"
    r"|u?(?:char|short|int|long|longlong|float|double|half|bfloat16)[1-4]?"
)
_C_INTRODUCERS = frozenset("struct class enum union typename namespace using define".split())
_C_POINTERS = frozenset("* & const volatile __restrict__ __restrict restrict".split())
_C_KEYWORDS = frozenset(
    "if else for while do return break continue switch case default goto static inline constexpr extern template operator sizeof new delete "
    "this true false nullptr public private const volatile typedef".split()
)


def _c_form(text: str, shared: dict[str, str]) -> str:
    """Tokens with the names that the text declares numbered: v within a function, c of the whole; the latter are entered in `shared`, for
    the other texts of one extension. A name whose declaration is not recognised stays as it is."""
    out: list[str] = []
    for part in _c_parts(_c_tokens(text)):
        own: dict[str, str] = {}
        for name, of_all in _c_declared(part):
            if of_all:
                shared.setdefault(name, f"c{len(shared)}")
            elif name not in shared:
                own.setdefault(name, f"v{len(own)}")
        for i, token in enumerate(part):
            member = (i and part[i - 1] in (".", "->", "::")) or (i + 1 < len(part) and part[i + 1] == "::")
            out.append(token if member else own.get(token) or shared.get(token, token))
    return " ".join(out)


def _c_tokens(text: str) -> list[str]:
    out: list[str] = []
    for match in _C_TOKEN.finditer(text.replace("\\\n", " ")):
        if match.lastgroup == "directive":
            out += ["#", *_c_tokens(match.group().lstrip()[1:]), "\n"]
        elif match.lastgroup == "number":
            out.append(_c_number(match.group()))
        elif match.lastgroup != "skip":
            out.append(match.group())
    return out


def _c_number(text: str) -> str:
    found = _C_NUMBER.fullmatch(text.replace("'", ""))
    digits, suffix = found.groups() if found else ("", "")
    try:
        if digits[:2] in ("0x", "0X"):
            value = int(digits, 16)
        elif set(digits) & set(".eE"):
            value = float(digits)
        else:
            value = int(digits, 8 if digits.startswith("0") else 10)
    except ValueError:
        return text
    return f"{value!r}{''.join(sorted(suffix.lower()))}"


def _c_parts(tokens: list[str]) -> Iterator[list[str]]:
    """Functions, declarations and directives at the top level; namespaces and extern "C" blocks are looked into."""
    start = depth = 0
    for i, token in enumerate(tokens):
        if token == "{":
            if not depth and (tokens[start] == "namespace" or tokens[start:i] == ["extern", '"C"']):
                yield tokens[start : i + 1]
                start = i + 1
                continue
            depth += 1
        elif token == "}":
            depth = max(depth - 1, 0)
        if not depth and token in (";", "}", "\n"):
            yield tokens[start : i + 1]
            start = i + 1
    yield tokens[start:]


def _c_declared(part: list[str]) -> Iterator[tuple[str, bool]]:
    """Names that a part declares, and whether other parts see them."""
    types: set[str] = set()
    braces = brackets = 0
    for i, token in enumerate(part):
        braces += (token == "{") - (token == "}")
        brackets += (token in ("(", "[")) - (token in (")", "]"))
        if not _may_be_declared(token) or not i or part[i - 1] in (".", "->", "::") or part[i + 1 : i + 2] == ["::"]:
            continue
        if part[i - 1] in _C_INTRODUCERS:
            types.add(token)
            yield token, not braces
            continue
        before = _c_before(part, i - 1)
        if _C_TYPE.fullmatch(part[before]) or part[before] in types:
            of_all = not braces and not brackets
            yield token, of_all
            yield from ((name, of_all) for name in _c_further(part, i + 1))


def _c_before(part: list[str], at: int) -> int:
    """Where the type of a declared name stands, if it is one: before pointers and attributes such as __launch_bounds__(256)."""
    while at:
        if part[at] == ")" and "__launch_bounds__" in part[:at]:
            at = part.index("__launch_bounds__") - 1
        elif part[at] in _C_POINTERS or re.fullmatch(r"__\w+__", part[at]):
            at -= 1
        else:
            break
    return at


def _c_further(part: list[str], at: int) -> Iterator[str]:
    """b and c of `int a = 0, *b, c[4];`, from after a on."""
    depth = 0
    for i in range(at, len(part)):
        token = part[i]
        if token == ";" or (token == "{" and part[i - 1] == ")") or (token in (")", "]", "}") and not depth):
            return
        depth += (token in ("(", "[", "{")) - (token in (")", "]", "}"))
        if token == "," and not depth:
            i += 1
            while i < len(part) and part[i] in _C_POINTERS:
                i += 1
            if part[i + 1 : i + 2] and part[i + 1] in ("=", ";", ",", "[", "(", ":") and _may_be_declared(part[i]):
                yield part[i]


def _may_be_declared(token: str) -> bool:
    plain = (token[0].isalpha() or token[0] == "_") and not token.startswith("__")
    return plain and token not in _C_KEYWORDS and token not in _C_INTRODUCERS and not _C_TYPE.fullmatch(token)
