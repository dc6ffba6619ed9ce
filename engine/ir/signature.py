"""Signature: one legal row (input SBPs -> output SBPs) of an op, for ONE axis.

With it, what rules and local programs are given, and the words that tables are written in.
A rule is a function `rule(view) -> tuple of Signature`; registry.py holds the one explicit table
target -> rule and lifts rows to n axes by a product, axis after axis, on the shape left over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Any

import torch

from flowrun.engine.ir.graph import Op, refs
from flowrun.engine.ir.placement import Shape, Slices
from flowrun.engine.ir.sbp import B, NdSbp, Owned, P, S, Sbp, format_nd_sbp, parse_sbp
from flowrun.engine.torch_internals import schema_of


@dataclass(frozen=True, slots=True)
class Signature:
    """A row of an op, for one axis.

    inputs: an SBP for each of op.inputs.
    outputs: an SBP for each of op.outputs (an entry for unused ones too).
    reduced: elements in fp32 that the row's expansion reduces over the axis inside (0: none);
        such a row is replaced by ordinary ops and boxings (OpInfo.expands).
    turned: positions of the inputs that go around the ranks of the axis inside the op, so that each
        rank meets all of them (backward with their gradients): an expansion, too.
    travels: rows of the inputs go to other ranks and come back inside the op: an expansion, too,
        which costs what its ops and boxings do (cost/expansion_cost.py).
    """

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]
    reduced: int = 0
    turned: tuple[int, ...] = ()
    travels: bool = False

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


OpRows = tuple[Signature, ...]


@dataclass(frozen=True, slots=True)
class NdSignature:
    """A row of an op for all axes of a grid: an nd-SBP for each of op.inputs and op.outputs."""

    inputs: tuple[NdSbp, ...]
    outputs: tuple[NdSbp, ...]

    @classmethod
    def of(cls, axes: Sequence[Signature]) -> NdSignature:
        """Return the row that has these rows on the axes, outermost first."""
        return cls(
            tuple(zip(*(row.inputs for row in axes), strict=True)),
            tuple(zip(*(row.outputs for row in axes), strict=True)),
        )

    def __str__(self) -> str:
        left, right = (", ".join(map(format_nd_sbp, side)) for side in (self.inputs, self.outputs))
        return f"{left} -> {right}"


Function = Callable[..., Any]  # of torch or of the engine, with arguments of its own kinds


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A rank runs function(*args, **kwargs) in place of the op; Refs stand where tensors go."""

    function: Function
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class OpView:
    """A rule sees an op, the shapes left over by the axes before, and the parts of this axis.

    in_shapes: one for each of op.inputs.
    out_shapes: one for each of op.outputs (None where unused and unknown).
    """

    op: Op
    in_shapes: tuple[Shape, ...]
    out_shapes: tuple[Shape | None, ...]
    parts: int

    @property
    def given(self) -> dict[str, Any]:
        """Every argument of a torch op by its name, defaults filled in."""
        return bind(self.op)

    def row(self, sbps: Mapping[str, Sbp], *outputs: Sbp, reduced: int = 0) -> Signature:
        """Return a row of a torch op: SBPs of the tensor arguments by name, B for others.

        outputs: an SBP for each output; one alone stands for all.  reduced: see Signature.
        """
        inputs = tuple(sbps.get(name, B) for name in places(self.op))
        out_sbps = outputs * len(self.op.outputs) if len(outputs) == 1 else outputs
        return Signature(inputs, out_sbps, reduced)

    def partial(self, *groups: Sequence[str]) -> OpRows:
        """Return P rows: for each group of arguments (by name) in which the op is jointly linear, P
        on the group and B on the rest -> P.

        A group with an argument that is a Python number gives no row: x + 1 on every rank would add
        1 too often.
        """
        names = places(self.op) if groups else ()
        linear = (group for group in groups if set(group) <= set(names))
        return tuple(self.row(dict.fromkeys(group, P), P) for group in linear)

    @property
    def made(self) -> Shape:
        """The shape of the op's only output."""
        (made,) = self.out_shapes
        assert made is not None, f"{self.op.name}: its only output is unused"
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalView:
    """A local program sees an op and which slices of its tensors this rank holds.

    in_slices, out_slices: ((start, length), …) along every dim of the logical tensor, for each of
    op.inputs / op.outputs, all axes together.
    in_shapes, out_shapes: the logical shapes.
    """

    op: Op
    in_shapes: tuple[Shape, ...]
    out_shapes: tuple[Shape | None, ...]
    in_slices: tuple[Slices, ...]
    out_slices: tuple[Slices | None, ...]

    @property
    def given(self) -> dict[str, Any]:
        """Every argument of a torch op by its name, defaults filled in."""
        return bind(self.op)

    @property
    def made(self) -> Slices:
        """The slices of the op's only output that this rank holds."""
        (made,) = self.out_slices
        assert made is not None, f"{self.op.name}: its only output is unused"
        return made

    @property
    def made_shape(self) -> Shape:
        """The shape of what this rank holds of the op's only output."""
        return sizes(self.made)

    def rebind(self, function: Function | None = None, **changed: object) -> LocalCall:
        """Return the torch op as a call, as `rebind` does."""
        return rebind(self.op, function, **changed)


Rule = Callable[[OpView], OpRows]
Local = Callable[[LocalView], LocalCall]


def whole(view: OpView) -> OpRows:
    """No row but all-B: the rule of an op that every rank does on whole tensors."""
    return ()


def rows(*texts: str) -> OpRows:
    """Rows from text: rows("S0,B -> S0", "P,B -> P")."""
    sides = (text.split("->") for text in texts)
    return tuple(Signature(_sbps(left), _sbps(right)) for left, right in sides)


def _sbps(text: str) -> tuple[Sbp, ...]:
    return tuple(parse_sbp(word) for word in text.split(",") if word.strip())


# ---- arguments by name ---------------------------------------------------------------------------


@cache
def torch_callable(target: str) -> Any:
    """Return the torch operator of a target: "aten.mm.default" -> torch.ops.aten.mm.default."""
    operator: Any = torch.ops
    for part in target.split("."):
        operator = getattr(operator, part)
    return operator


@cache
def _parameters(target: str) -> tuple[tuple[str, object], ...]:
    schema = schema_of(torch_callable(target))
    return tuple((arg.name, arg.default_value) for arg in schema.arguments)


def argument_names(target: str) -> tuple[str, ...]:
    """Names of a torch op's arguments, in the order of its schema."""
    return tuple(name for name, _ in _parameters(target))


def bind(op: Op) -> dict[str, Any]:
    """Every argument of a torch op by its name in the operator's schema, defaults filled in."""
    given = zip(argument_names(op.target), op.args, strict=False)
    return {**dict(_parameters(op.target)), **dict(given), **dict(op.kwargs)}


def places(op: Op) -> tuple[str, ...]:
    """Return for each of op.inputs the name of the argument it is (part of)."""
    given = [*zip(argument_names(op.target), op.args, strict=False), *op.kwargs]
    return tuple(name for name, value in given for _ in refs(value))


def rebind(op: Op, function: Function | None = None, **changed: object) -> LocalCall:
    """Return the torch op as a call with some arguments replaced; function: in place of the op."""
    names, args, kwargs = argument_names(op.target), list(op.args), dict(op.kwargs)
    for name, value in changed.items():
        if name in names[: len(args)]:
            args[names.index(name)] = value
        else:
            kwargs[name] = value
    return LocalCall(function or torch_callable(op.target), tuple(args), tuple(kwargs.items()))


# ---- rows from labelled dims ---------------------------------------------------------------------

Labels = tuple[int | str | None, ...]


def dims_but(ndim: int, *dims: int) -> Labels:
    """Label each of `ndim` dims by its number, and `dims`, which may be negative, by None."""
    unsplit = {d % ndim for d in dims} if ndim else ()
    return tuple(None if d in unsplit else d for d in range(ndim))


def labelled_rows(
    ins: Sequence[Labels],
    outs: Sequence[Labels],
    contracted: Mapping[Any, Sbp] = MappingProxyType({}),
) -> OpRows:
    """Return rows of an op whose dims carry labels, as in einsum.

    ins, outs: labels of the dims of each input and output; a dim labelled None cannot be split.

    A label splits every tensor that has it and leaves the others B.  An output that lacks it
    becomes `contracted[label]`; a label that is neither in all outputs nor contracted gives no row.
    """
    labels = dict.fromkeys(label for dims in (*ins, *outs) for label in dims)
    return tuple(
        Signature(
            tuple(S(dims.index(label)) if label in dims else B for dims in ins),
            tuple(S(dims.index(label)) if label in dims else contracted[label] for dims in outs),
        )
        for label in labels
        if label is not None and all(label in dims or label in contracted for dims in outs)
    )


def owned_rows(op: Op, owner: int, in_shapes: Sequence[Shape]) -> OpRows:
    """Return the rows by which one rank of the axis runs an op alone, of what it owns; a single
    number may also be everyone's.  They hold for any op.
    """
    mine = Owned(owner)
    options: list[tuple[Sbp, ...]] = [(mine,) if shape else (mine, B) for shape in in_shapes]
    outputs = (mine,) * len(op.outputs)
    return tuple(Signature(row, outputs) for row in product(*options) if mine in row)


# ---- what a rank holds ---------------------------------------------------------------------------


def sizes(slices: Slices) -> Shape:
    """Lengths of slices: the local shape."""
    return tuple(length for _, length in slices)
