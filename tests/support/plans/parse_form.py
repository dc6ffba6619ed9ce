"""Read the text of a CallForm."""

import ast
from collections.abc import Mapping
from typing import Any

import torch

from flowrun.engine.ir.graph import Ref
from flowrun.engine.ops.proof.call_form import CallForm, FormDims, Letter, num_returns


def parse_form(text: str, sizes: Mapping[str, int]) -> CallForm:
    """Read what str() of a CallForm prints.  sizes: those that it was of."""
    called, _, unused = text.partition(" -> ")
    call = ast.parse(called, mode="eval").body
    assert isinstance(call, ast.Call), text
    reader = _FormParser()
    args = tuple(map(reader.value, call.args))
    kwargs = tuple((str(word.arg), reader.value(word.value)) for word in call.keywords)
    target = ast.unparse(call.func)
    used = tuple(mark == "x" for mark in unused) if unused else (True,) * num_returns(target)
    shapes, dtypes = zip(*reader.tensors, strict=True)
    return CallForm(
        target=target,
        args=args,
        kwargs=kwargs,
        shapes=shapes,
        dtypes=dtypes,
        used=used,
        sizes=tuple(sizes.items()),
    )


class _FormParser:
    """Values of a form's text, in order."""

    def __init__(self) -> None:
        self.tensors: list[tuple[FormDims, torch.dtype]] = []

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Subscript(value=ast.Name(id=kind), slice=inside):
                self.tensors.append((self._dims(inside), getattr(torch, _WIDTHS.get(kind, kind))))
                return Ref(str(len(self.tensors) - 1))
            case ast.List(elts=items):
                return tuple(map(self.value, items))
            case ast.Attribute(attr=name):
                return getattr(torch, name)
            case ast.Name(id="inf" | "nan" as name):
                return float(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand)
            case ast.Name(id=name):
                return Letter(name)
            case _:
                return ast.literal_eval(node)

    def _dims(self, node: ast.expr) -> FormDims:
        items = node.elts if isinstance(node, ast.Tuple) else [node]
        return tuple(map(self.value, items))


_WIDTHS = {"float": "float32", "complex": "complex64"}
