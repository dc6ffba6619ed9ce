"""Logical graphs written as text, in the notation that they print: text in, text out.

A line is a variable, a feed, an op or a result:

    parameter fc.weight = %w: float32[4, 8]
    feed x = %x: float32[2, 8]
    %y = aten.mm.default(%x, %wt)  # forward fc stage 0
    result loss = %y

Shapes of what ops make are computed by torch on its meta device.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import torch

from flowrun.engine.graph import Feed, LogicalGraph, Op, Ref, Tensor, Variable, map_refs

_SOURCE = re.compile(r"(\w+) (\S+) = %(\S+): (\w+)\[(.*)\]")
_OP = re.compile(r"(.*?) = ([\w.]+)\((.*)\)  # (\w+) (\S+) stage (\d+)")
_NAME = re.compile(r"%[\w./]+")
_RESULT = re.compile(r"result (\S+) = %(\S+)")


def graph_of(text: str) -> LogicalGraph:
    """Read a graph."""
    reader = _Reader()
    for line in filter(None, map(str.strip, text.splitlines())):
        reader.line(line)
    return LogicalGraph(
        tuple(reader.ops),
        reader.tensors,
        tuple(reader.variables),
        tuple(reader.feeds),
        tuple(reader.results),
    )


def ops_text(graph: LogicalGraph, phase: str | None = None) -> list[str]:
    """The lines of a graph's ops, of one phase or of all."""
    return [str(op) for op in graph.ops if phase in (None, op.phase)]


class _Reader:
    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.tensors: dict[str, Tensor] = {}
        self.variables: list[Variable] = []
        self.feeds: list[Feed] = []
        self.results: list[tuple[str, str]] = []

    def line(self, line: str) -> None:
        """One line of any kind."""
        if match := _RESULT.fullmatch(line):
            self.results.append((match[1], match[2]))
        elif match := _SOURCE.fullmatch(line):
            kind, name, tensor, dtype, shape = match.groups()
            sizes = tuple(int(n) for n in shape.split(",") if n.strip())
            self.tensors[tensor] = Tensor(tensor, sizes, getattr(torch, dtype))
            if kind == "feed":
                self.feeds.append(Feed(name, tensor))
            else:
                self.variables.append(Variable(name, tensor, kind))
        else:
            match = _OP.fullmatch(line)
            assert match, f"no line of a graph: {line!r}"
            self._op(*match.groups())

    def _op(self, made: str, target: str, args: str, phase: str, module: str, stage: str) -> None:
        outputs = tuple(None if m == "_" else m.removeprefix("%") for m in made.split(", "))
        arguments = _arguments(ast.literal_eval(f"({_NAME.sub(_quoted, args)},)"))
        name = next(filter(None, outputs))
        module = "" if module == "-" else module
        self.ops.append(Op(name, target, arguments, (), outputs, module, phase, stage=int(stage)))
        computed = self._compute(target, arguments)
        for output, value in zip(outputs, computed, strict=True):
            if output is not None:
                self.tensors[output] = Tensor(output, tuple(value.shape), value.dtype)

    def _compute(self, target: str, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        namespace, name, overload = target.split(".")
        function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        made = function(*map_refs(arguments, self._meta))
        return made if isinstance(made, tuple) else (made,)

    def _meta(self, ref: Ref) -> torch.Tensor:
        tensor = self.tensors[ref.name]
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _quoted(match: re.Match[str]) -> str:
    return f'"{match[0]}"'


def _arguments(value: Any) -> Any:
    """Lists become tuples, as in every Op, and "%name" a Ref."""
    if isinstance(value, str) and value.startswith("%"):
        return Ref(value[1:])
    return tuple(map(_arguments, value)) if isinstance(value, (list, tuple)) else value
