"""Logical graphs written as text, in the notation that they print: text in, text out.

A line is a variable, a feed, an op or a result:

    parameter fc.weight = %w: float32[4, 8]
    feed x = %x: float32[2, 8]
    %y = aten.mm.default(%x, %wt)  # forward fc stage 0
    result loss = %y

Shapes of what ops make are computed by torch on its meta device.
"""

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from flowrun.engine.ir.graph import Feed, LogicalGraph, LogicalTensor, Op, Ref, Variable, map_refs
from flowrun.engine.ir.placement import Placement
from flowrun.engine.ir.sbp import B, Sbp
from flowrun.engine.ops import registry
from flowrun.engine.pipeline import PASSES, Pass
from flowrun.engine.strategy import Optimizer, Strategy

SGD = Optimizer("sgd", (("lr", 0.1), ("momentum", 0.9)))
_SOURCE = re.compile(r"(\w+) (\S+) = %(\S+): (\w+)\[(.*)\]")
_OP = re.compile(r"(.*?) = ([\w.]+)\((.*)\)  # (\w+) (\S+) stage (\d+)")
_NAME = re.compile(r"%[\w./]+|torch\.\w+")
_KEYWORD = re.compile(r", (\w+)=(torch\.\w+)")
_RESULT = re.compile(r"result (\S+) = %(\S+)")


def graph_of(text: str) -> LogicalGraph:
    reader = _Reader()
    for line in filter(None, map(str.strip, text.splitlines())):
        reader.line(line)
    return LogicalGraph(
        tuple(reader.ops),
        reader.tensors,
        tuple(reader.variables),
        tuple(reader.feeds),
        results=tuple(reader.results),
    )


def assert_ops(ops: Iterable[Op], text: str) -> None:
    """The ops print as the lines of a text."""
    found = [" ".join(str(op).split()) for op in ops]
    assert found == [" ".join(line.split()) for line in text.strip().splitlines()]


# Two linear layers without bias, a relu between them, and a sum for a loss.
TWO_LAYERS = """
    parameter a.weight = %a.weight: float32[8, 4]
    parameter b.weight = %b.weight: float32[2, 8]
    feed x = %x: float32[6, 4]
    feed @tangent = %tangent: float32[]
    %at = aten.t.default(%a.weight)  # forward a stage 0
    %h = aten.mm.default(%x, %at)  # forward a stage 0
    %r = aten.relu.default(%h)  # forward act stage 0
    %bt = aten.t.default(%b.weight)  # forward b stage 0
    %y = aten.mm.default(%r, %bt)  # forward b stage 0
    %loss = aten.sum.default(%y)  # forward loss stage 0
    %dy = aten.expand.default(%tangent, [6, 2])  # backward loss stage 0
    %dyt = aten.t.default(%dy)  # backward b stage 0
    %db = aten.mm.default(%dyt, %r)  # backward b stage 0
    %dr = aten.mm.default(%dy, %b.weight)  # backward b stage 0
    %dh = aten.threshold_backward.default(%dr, %h, 0)  # backward act stage 0
    %dht = aten.t.default(%dh)  # backward a stage 0
    %da = aten.mm.default(%dht, %x)  # backward a stage 0
    result loss = %loss
    result grad/a.weight = %da
    result grad/b.weight = %db
"""


def two_layers() -> LogicalGraph:
    return graph_of(TWO_LAYERS)


def one_axis(name: str, parts: int = 2, **rest: Any) -> Strategy:
    """A strategy of one stage and one axis; SGD."""
    placement = Placement(((name, parts),), tuple(range(parts)))
    return Strategy((name,), (placement,), optimizer=SGD, **rest)


def one_rank_stages(stages: int, **rest: Any) -> Strategy:
    """A strategy of stages of one rank each; SGD, two micro-batches."""
    placements = tuple(Placement((), (s,)) for s in range(stages))
    return Strategy((), placements, **{"optimizer": SGD, "micro_batches": 2, **rest})


def one_op(
    name: str, target: str, *args: Any, ins: Sequence[Sbp] = (), out: Sbp = B, **more: Any
) -> Op:
    """An op on one axis.  args: names of tensors, as many as `ins`, and others.  more: fields."""
    read = map(Ref, args[: len(ins)])
    fields = {"module": "m", "in_sbp": tuple((sbp,) for sbp in ins), "out_sbp": ((out,),), **more}
    return Op(name, target, (*read, *args[len(ins) :]), outputs=(name,), **fields)


def rewritten(
    passes: Iterable[Pass], strategy: Strategy, graph: LogicalGraph | None = None
) -> LogicalGraph:
    """A graph, or TWO_LAYERS, after some passes."""
    graph = graph or two_layers()
    for rewrite in passes:
        graph = rewrite(graph, strategy)
    return graph


def through(last: Pass) -> tuple[Pass, ...]:
    """PASSES up to one, with it."""
    return PASSES[: PASSES.index(last) + 1]


class _Reader:
    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.tensors: dict[str, LogicalTensor] = {}
        self.variables: list[Variable] = []
        self.feeds: list[Feed] = []
        self.results: list[tuple[str, str]] = []

    def line(self, line: str) -> None:
        if match := _RESULT.fullmatch(line):
            self.results.append((match[1], match[2]))
        elif match := _SOURCE.fullmatch(line):
            kind, name, tensor, dtype, shape = match.groups()
            sizes = tuple(int(n) for n in shape.split(",") if n.strip())
            self.tensors[tensor] = LogicalTensor(tensor, sizes, getattr(torch, dtype))
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
        keywords = tuple((name, _arguments(value)) for name, value in _KEYWORD.findall(args))
        args = _NAME.sub(_quoted, _KEYWORD.sub("", args))
        arguments = _arguments(ast.literal_eval(f"({args},)"))
        name = next(filter(None, outputs))
        module = "" if module == "-" else module
        self.ops.append(
            Op(
                name,
                target,
                arguments,
                keywords,
                outputs=outputs,
                module=module,
                phase=phase,
                stage=int(stage),
            )
        )
        computed = self._compute(target, arguments, dict(keywords))
        for output, value in zip(outputs, computed, strict=True):
            if output is not None:
                self.tensors[output] = LogicalTensor(output, tuple(value.shape), value.dtype)

    def _compute(
        self, target: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[torch.Tensor, ...]:
        function = registry.whole_function(target)
        made = function(*map_refs(arguments, self._meta), **keywords)
        return made if isinstance(made, tuple) else (made,)

    def _meta(self, ref: Ref) -> torch.Tensor:
        tensor = self.tensors[ref.name]
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _quoted(match: re.Match[str]) -> str:
    return f'"{match[0]}"'


def _arguments(value: Any) -> Any:
    """Lists become tuples, as in every Op, "%name" a Ref, and "torch.name" a dtype."""
    if isinstance(value, str) and value.startswith("%"):
        return Ref(value[1:])
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return tuple(map(_arguments, value)) if isinstance(value, (list, tuple)) else value
