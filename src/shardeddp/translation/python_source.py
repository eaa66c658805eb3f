"""Python source: values of its expressions and the strategies that it makes, without running it."""

from __future__ import annotations

# ruff: noqa: SIM905  # tables of words are read as text
import ast
from collections import Counter
from typing import Any, cast

from shardeddp.translation.calls import Call, Expression
from shardeddp.translation.strategies import RULES

_READ = (
    "partial ModuleWrapPolicy CustomPolicy MixedPrecision MixedPrecisionPolicy CPUOffload "
    "CPUOffloadPolicy OffloadPolicy init_device_mesh timedelta"
).split()
"""Calls that rules inspect; others are passed on as source."""

_HARMLESS = {*RULES, *_READ, "Trainer", "Fabric", "ShardedDP"} - {"partial"}
"""Calls that do not mutate their arguments."""

_ENUMERATIONS = ("ShardingStrategy", "BackwardPrefetch")

_DTYPES = "bfloat16 float16 half float32 float float64 double".split()

_SCOPES = (
    ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.ListComp,
    ast.SetComp, ast.DictComp, ast.GeneratorExp,
)  # fmt: skip

_Binding = tuple[ast.AST, ast.AST]
"""Parent node of a name's binding, and the enclosing module, function or class."""


class SourceReader:
    """Static evaluator of the expressions in one Python file.

    A name has a value if the whole file binds it once, by a plain assignment in the module or in
    the same function. A mutable value must in addition be used only by the calls that this reader
    is meant for.
    """

    def __init__(self, tree: ast.Module) -> None:
        # Imports by local name: module, and the name in that module.
        self._imported: dict[str, tuple[str, str]] = {}
        self._bound: dict[str | None, list[_Binding]] = {}
        self._scopes: dict[ast.AST, ast.AST] = {}
        self._loads: Counter[str] = Counter()
        self._following: set[str] = set()
        waiting: list[tuple[ast.AST, ast.AST, ast.AST]] = [(tree, tree, tree)]
        while waiting:
            node, parent, scope = waiting.pop()
            self._scopes[node] = scope
            for name in _bound_by(node):
                self._bound.setdefault(name, []).append((parent, scope))
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = node.module if isinstance(node, ast.ImportFrom) else None
                for alias in node.names:
                    self._imported[alias.asname or alias.name] = module or alias.name, alias.name
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self._loads[node.id] += 1
            inner = node if isinstance(node, _SCOPES) else scope
            waiting += [(child, node, inner) for child in ast.iter_child_nodes(node)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (
                self.name_of(node.func) in _HARMLESS or self.strategy_of(node)
            ):
                given = [*node.args, *(it.value for it in node.keywords)]
                self._loads.subtract(it.id for it in given if isinstance(it, ast.Name))

    def _value_of(self, name: ast.Name) -> ast.expr | None:
        """Return the only expression that a name is bound to; None if it may vary."""
        bindings = self._bound.get(name.id, [])
        if len(bindings) != 1 or name.id in self._following:
            return None
        (assigned, scope) = bindings[0]
        seen = isinstance(scope, ast.Module) or scope is self._scopes.get(name)
        if not seen or isinstance(scope, ast.ClassDef):
            return None
        match assigned:
            case ast.Assign(targets=[_], value=value) | ast.AnnAssign(value=value):
                return value
            case _:
                return None

    def _followed(self, name: ast.Name) -> Any:
        value = self._value_of(name)
        if value is None:
            return Expression(name.id)
        self._following.add(name.id)
        found = self.read(value)
        self._following.discard(name.id)
        changes = isinstance(found, (list, dict, tuple, Call)) and self._loads[name.id] > 0
        return Expression(name.id) if changes or isinstance(found, Expression) else found

    def strategy_of(self, call: ast.Call) -> tuple[str, list[ast.expr]] | None:
        """Return the strategy that a call or partial constructs, and its positional arguments."""
        name = self.name_of(call.func)
        if name in RULES:
            return name, call.args
        if name == "partial" and call.args and (name := self.name_of(call.args[0])) in RULES:
            return name, call.args[1:]
        return None

    def is_strategy(self, value: ast.expr) -> bool:
        """True if an expression constructs a strategy, which is reported at its own line."""
        if isinstance(value, ast.Name):
            value = self._value_of(value) or value
        return isinstance(value, ast.Call) and self.name_of(value.func) in (*RULES, "ShardedDP")

    def name_of(self, function: ast.expr) -> str:
        """Return the original name of a function, through imports and aliases; else empty."""
        if isinstance(function, ast.Attribute):
            return function.attr
        if not isinstance(function, ast.Name):
            return ""
        value = self._value_of(function)
        if isinstance(value, (ast.Name, ast.Attribute)):
            self._following.add(function.id)
            name = self.name_of(value)
            self._following.discard(function.id)
            return name
        return self._imported.get(function.id, ("", function.id))[1].rpartition(".")[2]

    def is_fabric(self, node: ast.AST) -> bool:
        """True if a call constructs a Fabric, or a name comes from Fabric's modules."""
        function = node.func if isinstance(node, ast.Call) else node
        if isinstance(function, ast.expr) and self.name_of(function) == "Fabric":
            return True
        root = function
        while isinstance(root, ast.Attribute):
            root = root.value
        named = ast.unparse(function)
        module = self._imported.get(root.id, ("",))[0] if isinstance(root, ast.Name) else ""
        return any(
            "fabric" in it.split(".")[:2] or "lightning_fabric" in it for it in (module, named)
        )

    def arguments(self, call: ast.Call) -> tuple[dict[str, Any], list[str]]:
        """Return keyword arguments by name, and the source of unreadable ``**`` arguments."""
        given: dict[str, Any] = {}
        unread: list[str] = []
        for each in call.keywords:
            value = self.read(each.value)
            if each.arg is not None:
                given[each.arg] = value
            elif isinstance(value, dict) and all(
                isinstance(key, str) for key in cast("dict[Any, Any]", value)
            ):
                given |= cast("dict[str, Any]", value)
            else:
                unread.append(f"**{ast.unparse(each.value)}")
        return given, unread

    def read(self, node: ast.expr) -> Any:
        """Evaluate to a plain value, a :class:`Call`, or an :class:`Expression`."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.Name():
                return self._followed(node)
            case ast.Attribute(value=owner, attr=word) if self.name_of(owner) in _ENUMERATIONS:
                return word
            case ast.Attribute(value=ast.Name(id="torch"), attr=word) if word in _DTYPES:
                return f"torch.{word}"
            case ast.Set(elts=items) | ast.List(elts=items) | ast.Tuple(elts=items) if not any(
                isinstance(it, ast.Starred) for it in items
            ):
                kind = tuple if isinstance(node, ast.Tuple) else list
                return kind(map(self.read, items))
            case ast.Dict(keys=keys, values=values) if all(
                isinstance(key, ast.Constant) for key in keys
            ):
                names = [key.value for key in keys if isinstance(key, ast.Constant)]
                return dict(zip(names, map(self.read, values), strict=True))
            case ast.Call(func=ast.Name(id="dict"), args=[]):
                given, unread = self.arguments(node)
                return Expression(ast.unparse(node)) if unread else given
            case ast.Call(func=function) if self.name_of(function) in _READ:
                given, unread = self.arguments(node)
                if unread or any(isinstance(it, ast.Starred) for it in node.args):
                    return Expression(ast.unparse(node))
                return Call(
                    path=self.name_of(function),
                    positional=tuple(map(self.read, node.args)),
                    arguments=given,
                    written=ast.unparse(node),
                )
            case _:
                return Expression(ast.unparse(node))


def _bound_by(node: ast.AST) -> list[str | None]:
    """Names that a node binds, deletes or declares global or nonlocal."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.alias):
        return [node.asname or node.name.partition(".")[0]]
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return [*node.names]
    found = dict(ast.iter_fields(node))
    return [found.get("name"), found.get("rest"), node.arg if isinstance(node, ast.arg) else None]
