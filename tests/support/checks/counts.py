"""What a tree of Python files is measured by, besides its lines."""

import ast
from collections.abc import Iterator
from pathlib import Path

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.Assert)


def anys(tree: ast.Module) -> int:
    """How often `Any` is a type; its import is no use."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))


def broad_handlers(tree: ast.Module) -> int:
    """Handlers of `Exception`, `BaseException`, or of all."""
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    return sum(bool({"Exception", "BaseException", ""} & _caught(node)) for node in handlers)


def _caught(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {""}
    return {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}


def complex_functions(file: Path, most: int) -> list[str]:
    """FILE:LINE NAME complexity of each function that is above `most`."""
    found = [(node, complexity(node)) for node in _functions(ast.parse(file.read_text()))]
    return [f"{file}:{node.lineno} {node.name} {paths}" for node, paths in found if paths > most]


def _functions(tree: ast.AST) -> Iterator[_Function]:
    return (node for node in ast.walk(tree) if isinstance(node, _Function))


def complexity(function: _Function) -> int:
    """Independent paths (McCabe, 1976), where each `and`, `or`, loop and condition of a
    comprehension counts too.  Functions inside are counted apart.
    """
    return 1 + sum(_branches(node) for node in _body(function))


def _body(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Function | ast.ClassDef):
            yield child
            yield from _body(child)


def _branches(node: ast.AST) -> int:
    match node:
        case ast.BoolOp():
            return len(node.values) - 1
        case ast.Try() | ast.TryStar():
            return len(node.handlers) + bool(node.orelse)
        case ast.For() | ast.AsyncFor() | ast.While():
            return 1 + bool(node.orelse)
        case ast.comprehension():
            return 1 + len(node.ifs)
        case ast.Match():
            return sum(not _is_wildcard(case) for case in node.cases)
    return int(isinstance(node, _BRANCHES))


def _is_wildcard(case: ast.match_case) -> bool:
    return isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None
