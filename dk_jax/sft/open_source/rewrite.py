"""Rules that turn one function of a package into text that stands alone. They look at the syntax tree, never at which kernel it is.

Dropped: docstrings, annotations other than `tl.constexpr`, asserts, guards (an `if` that only raises), log messages, contexts that
choose the device, branches for other hardware or for types other than float32, what autograd's context keeps. Followed: every global
name, to the package's definition of it, which is needed too, or to torch or triton. Replaced: CUDA's device library and Python's math
by what torch and triton have. Anything else that the function needs is an `ExtractError`.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping

from dk_jax.sft.open_source.configs import last_name
from dk_jax.sft.open_source.expressions import ExpressionRewriter, bound_inside, local_names
from dk_jax.sft.open_source.facts import CONTEXTS, TALKATIVE
from dk_jax.sft.open_source.literals import Literal, does_nothing, drop_arguments, needs_first_value, strings_in, without_dead_stores
from dk_jax.sft.open_source.modules import ExtractError
from dk_jax.sft.open_source.values import DEVICE, TENSOR, Tensor

_ASSERTS = frozenset({"static_assert", "device_assert", "static_print", "device_print"})


class Rewriter(ExpressionRewriter):
    """Rewrites one function, or one expression, of a module; arguments as of `ExpressionRewriter`."""

    def function(
        self,
        node: ast.FunctionDef,
        *,
        jit: bool,
        context: str | None = None,
        given: Mapping[str, Literal] | None = None,
        of_model: bool = False,
    ) -> ast.FunctionDef:
        """The function, rewritten in place and without decorators.

        Args:
            jit: it runs on the GPU.
            context: name of an argument that is autograd's context; it is dropped.
            given: values of arguments that are dropped too, and written into the body; of those that are tensors, only this.
            of_model: it is the model's forward, whose `self` holds parameters.

        Raises:
            ExtractError: it needs something that cannot be had.
        """
        self._jit, self._context, self._of_model = jit, context, of_model
        if context is not None:
            node.args.args = node.args.args[1:]
        self._local = local_names(node)
        self._given = dict(given or {})
        self._stored = frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))
        kernel = jit and any(isinstance(n, ast.Call) and last_name(n) == "program_id" for n in ast.walk(node))
        self._parameters = frozenset(a.arg for a in node.args.args) if kernel else frozenset()
        self._strings = strings_in(node)
        self._unsafe = bound_inside(node)
        node.decorator_list = []
        written = {name: value for name, value in self._given.items() if not isinstance(value, Tensor)}
        self._given = {name: value for name, value in self._given.items() if name not in self._unsafe}
        drop_arguments(node.args, written)
        self._signature(node)
        node.body = self._block(node.body) or [ast.Pass()]
        without_dead_stores(node)
        for name, value in reversed(written.items()):
            if needs_first_value(node.body, name):
                node.body.insert(0, ast.Assign([ast.Name(name, ast.Store())], ast.Constant(value)))
        for inner in ast.walk(node):
            if isinstance(inner, (ast.Global, ast.Yield, ast.YieldFrom, ast.Await)):
                raise ExtractError(f"{self._source.name}:{node.name} holds {type(inner).__name__.lower()}")
            if context is not None and isinstance(inner, ast.Name) and inner.id == context:
                raise ExtractError(f"{self._source.name}:{node.name} needs autograd's context")
        return node

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for node in body:
            new = self._statement(node)
            out += new
            if not isinstance(node, (ast.If, ast.With, ast.Try)):  # whose parts have seen to it themselves
                self._forget(node)
                self._learn(new)
            if new and isinstance(new[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break)):
                break
        return out

    def _statement(self, node: ast.stmt) -> list[ast.stmt]:
        if isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or self._only_tells(node.value)):
            return []
        if isinstance(node, (ast.Assert, ast.Pass)) or self._is_of_context(node):
            return []
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return self._import(node)
        if isinstance(node, ast.If):
            return self._if(node)
        if isinstance(node, ast.With):
            return self._with(node)
        if isinstance(node, (ast.For, ast.While)):
            self._forget(node)
            if isinstance(node, ast.While):
                node.test = self._test(node.test)
            else:
                node.iter, node.target = self.visit(node.iter), self.visit(node.target)
            node.body, node.orelse = self._block(node.body) or [ast.Pass()], self._block(node.orelse)
            return [] if does_nothing(node) else [node]
        if isinstance(node, ast.FunctionDef):
            if node.decorator_list:
                raise ExtractError(f"{self._source.name}:{node.lineno}: {node.name} is decorated inside of a function")
            self._signature(node)
            node.body = self._inside(lambda: self._block(node.body)) or [ast.Pass()]
            return [node]
        if isinstance(node, ast.AnnAssign):
            if node.value is None:
                return []
            if not (self._jit and _is_constexpr(node.annotation)):
                return [self.visit(ast.copy_location(ast.Assign([node.target], node.value), node))]
            node.annotation, node.value, node.target = self.visit(node.annotation), self.visit(node.value), self.visit(node.target)
            return [node]
        if isinstance(node, ast.Try) and not self._jit:
            return self._block(self._index.taken(self._source.name, node))
        if isinstance(node, (ast.Try, ast.ClassDef, ast.AsyncFunctionDef, ast.Match)):
            raise ExtractError(f"{self._source.name}:{node.lineno}: a {type(node).__name__.lower()} statement inside of a function")
        return [self.visit(node)]

    def _if(self, node: ast.If) -> list[ast.stmt]:
        holds = self._truth(node.test)
        if holds is not None:
            return self._block(node.body if holds else node.orelse)
        if not self._jit and isinstance(node.body[-1], ast.Raise) and all(isinstance(n, (ast.Raise, ast.Expr)) for n in node.body):
            return self._block(node.orelse)
        before = dict(self._given)
        body = self._branch(node.body)
        self._given = dict(before)
        orelse = self._branch(node.orelse)
        self._given = before
        test = self._test(copy.deepcopy(node.test)) if body or orelse else node.test
        self._forget(node)
        if not body:
            test, body, orelse = ast.UnaryOp(ast.Not(), test), orelse, []
        return [ast.copy_location(ast.If(test, body, orelse), node)] if body else []

    def _branch(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """A branch of which is not known whether it runs. Where it cannot be had on the host, running it is an error."""
        if self._jit:
            return self._block(body)
        try:
            return self._block(body)
        except ExtractError:
            return [ast.parse("raise NotImplementedError").body[0]]

    def _with(self, node: ast.With) -> list[ast.stmt]:
        if all(item.optional_vars is None and last_name(item.context_expr) in CONTEXTS for item in node.items):
            return self._block(node.body)
        raise ExtractError(f"{self._source.name}:{node.lineno}: needs the context {ast.unparse(node.items[0].context_expr)!r}")

    def _import(self, node: ast.Import | ast.ImportFrom) -> list[ast.stmt]:
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            found = self._index.imported(self._source, node, name)
            if found is None:
                raise ExtractError(f"{self._source.name}:{node.lineno}: {ast.unparse(node)!r} cannot be followed")
            self._known[name] = found
        self._local -= set(self._known)
        return []

    def _only_tells(self, node: ast.expr) -> bool:
        root = node.func if isinstance(node, ast.Call) else None
        if self._jit and isinstance(root, ast.Attribute) and root.attr in _ASSERTS:
            return True
        while isinstance(root, ast.Attribute):
            root = root.value
        return isinstance(root, ast.Name) and root.id in TALKATIVE and root.id not in self._local

    def _is_of_context(self, node: ast.stmt) -> bool:
        """Whether a statement only keeps something for autograd's backward."""
        if self._context is None:
            return False
        if isinstance(node, ast.Assign):
            return all(isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.value.id == self._context for t in node.targets)
        function = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        return isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == self._context

    def _signature(self, node: ast.FunctionDef) -> None:
        node.returns = None
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg)
        for argument in filter(None, arguments):
            annotation = argument.annotation
            argument.annotation = self.visit(annotation) if annotation is not None and self._jit and _is_constexpr(annotation) else None
        node.args.defaults = [self.visit(d) for d in node.args.defaults]
        node.args.kw_defaults = [d and self.visit(d) for d in node.args.kw_defaults]

    def _forget(self, node: ast.stmt) -> None:
        """Takes back the known values of arguments that a statement, or what came of it, has assigned to."""
        if self._given:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
                    self._given.pop(inner.id, None)

    def _learn(self, new: list[ast.stmt]) -> None:
        """Takes note of a variable that has just got a literal value."""
        last = new[-1] if new else None
        if self._jit or not isinstance(last, ast.Assign) or len(last.targets) != 1:
            return
        if isinstance(last.targets[0], ast.Name) and last.targets[0].id not in self._unsafe:
            if self._is_tensor(last.value):
                self._given[last.targets[0].id] = TENSOR
            elif isinstance(last.value, ast.Attribute) and last.value.attr == "device":
                self._given[last.targets[0].id] = DEVICE
            elif isinstance(last.value, ast.Constant) and (last.value.value is None or isinstance(last.value.value, (bool, int, float, str))):
                self._given[last.targets[0].id] = last.value.value


def _is_constexpr(annotation: ast.expr) -> bool:
    return last_name(annotation) == "constexpr" or (isinstance(annotation, ast.Constant) and "constexpr" in str(annotation.value))
