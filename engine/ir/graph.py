"""LogicalGraph: what is computed in one training step, as if there were one huge device.

Made by capture.py, rewritten by the passes, lowered to a plan.  Everything is frozen; a pass
returns a new graph.  Levels, each with what it adds (pipeline.py has the passes that lead to each,
verify/ what each promises):

    captured   ops of one micro-batch, forward and backward, with logical shapes
    staged     + the stage of every op
    trained    + accumulation, clipping and update ops, run once a step
    laid_out   + one signature an axis for every op of forward and backward, homes of weights
    signed     + ZeRO, recomputation, and signatures of the update
    boxed      + boxing ops, so that every op reads what its signature says
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from flowrun.engine.ir.sbp import NdSbp, Pinned, format_nd_sbp

COUNT = "count"
WEIGHTS, FORWARD, BACKWARD = "weights", "forward", "backward"
WEIGHT_GRAD, UPDATE = "weight_grad", "update"
PHASES = (COUNT, WEIGHTS, FORWARD, BACKWARD, WEIGHT_GRAD, UPDATE)

CAPTURED, STAGED, TRAINED = "captured", "staged", "trained"
LAID_OUT, SIGNED, BOXED = "laid_out", "signed", "boxed"
LEVELS = (CAPTURED, STAGED, TRAINED, LAID_OUT, SIGNED, BOXED)


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor, by name, among the arguments of an op."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A logical tensor: shape in elements, before any split."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """T of the cost tables: bytes of the logical tensor."""
        return self.num_elements * self.dtype.itemsize

    def __str__(self) -> str:
        dtype, dims = str(self.dtype).removeprefix("torch."), ", ".join(map(str, self.shape))
        return f"%{self.name}: {dtype}[{dims}]"


class OwnRows(Protocol):
    """Rows that an op brings itself."""

    @property
    def origin(self) -> str:
        """Name the origin of the rows, for a note."""


@dataclass(frozen=True, slots=True)
class Op:
    """A node of the logical graph.

    target: "aten.mm.default", or "flow.*" for the engine's own ops.
    args, kwargs: nested tuples of constants and Refs.
    outputs: names of the tensors it makes; None where an output of the target is not used.
    module: dotted path of the user's module that the op came from; "loss" for the loss, "" for the
        step itself.
    stage: which group of ranks runs it.  chunk: which of the stage's pieces of the model it is of.
    in_sbp, out_sbp: nd-SBP of each of `inputs` and `outputs`, from level laid_out on; of the update
        from level signed on.
    table: rows of its own, where no family of the engine has any; table.py reads it.
    moment: a number that grows through forward; a backward op has that of its forward op; -1 where
        capture does not know.
    line: file:line of the user's that the op came from; "" if that is not known.
    owner: of the update of a weight that is needed whole: the place, in its stage's grid, of the
        rank that may run the op for all; None: it has the rows of its family alone.
    inputs: tensors read, in order of appearance in args and kwargs; one that is read twice appears
        twice.
    makes: the outputs that are used.
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    _: KW_ONLY
    outputs: tuple[str | None, ...] = ()
    module: str = ""
    phase: str = FORWARD
    stage: int = 0
    in_sbp: tuple[NdSbp, ...] = ()
    out_sbp: tuple[NdSbp, ...] = ()
    chunk: int = 0
    table: OwnRows | None = None
    owner: int | None = None
    moment: int = field(default=-1, compare=False)
    line: str = field(default="", compare=False)
    inputs: tuple[str, ...] = field(init=False, compare=False, repr=False)
    makes: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Passes ask for these all the time."""
        read = refs((self.args, self.kwargs))
        object.__setattr__(self, "inputs", tuple([ref.name for ref in read]))
        object.__setattr__(self, "makes", tuple([n for n in self.outputs if n is not None]))

    @property
    def per_step(self) -> bool:
        """True if the op runs once a step, False if once a micro-batch."""
        return self.phase in (WEIGHTS, UPDATE)

    def sbp_of(self, output: str) -> NdSbp:
        """Return the nd-SBP in which the op makes an output."""
        return self.out_sbp[self.outputs.index(output)]

    def __str__(self) -> str:
        outputs = ", ".join("_" if name is None else f"%{name}" for name in self.outputs)
        args = [_show(a) for a in self.args] + [f"{k}={_show(v)}" for k, v in self.kwargs]
        text = f"{outputs} = {self.target}({', '.join(args)})"
        if self.out_sbp:
            sides = (", ".join(map(format_nd_sbp, side)) for side in (self.in_sbp, self.out_sbp))
            text += f"  {' -> '.join(sides)}"
        return f"{text}  # {self.phase} {self.module or '-'} stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Variable:
    """A tensor that lives from step to step.

    name: the model's own ("blocks.0.attn.qkv.weight"), or a state's ("exp_avg/blocks.0…").
    tensor: its name in the graph, which no other tensor has (names.py).
    kind: parameter, buffer or state.
    new: the tensor that it becomes after the step (a buffer: after the micro-batch), or None.
    of: for a state, the parameter it belongs to ("" for one of the step itself).
    nd_sbp: its home, once known.  pinned: what the recipe fixes of it; a state has its parameter's.
    start: for a state, the number that fills it before the first step; None: it starts as what `of`
        starts as.
    aliases: other names that the model has for the same tensor (tied weights).
    own: B means here that each rank has a value of its own (a buffer in the mirrored view).
    copies: of one that lies in the host's memory, the copies of it and of `new` on the device;
        None: it lies there itself.
    decides: the graph is what it is since a buffer has the value that it has (known_values.py).
    """

    name: str
    tensor: str
    kind: str
    new: str | None = None
    _: KW_ONLY
    of: str = ""
    stage: int = 0
    nd_sbp: NdSbp = ()
    start: float | None = 0.0
    aliases: tuple[str, ...] = ()
    own: bool = False
    pinned: Pinned = ()
    copies: tuple[str, str] | None = None
    decides: bool = False


@dataclass(frozen=True, slots=True)
class Feed:
    """A field of the batch that enters the graph.  There is one for each stage that reads it.

    field: of the batch; one that begins with "@" is a number of the engine's own ("@step", the
        number of the step, from 1; "@draw", that of the micro-batch, from 0 over the whole run).
    per_step: it enters once a step, not once a micro-batch.
    values: of a number that the recipe foresees (the learning rate): one a step, the last holds on.
    """

    field: str
    tensor: str
    stage: int = 0
    nd_sbp: NdSbp = ()
    _: KW_ONLY
    per_step: bool = False
    values: tuple[float, ...] = ()
    pinned: Pinned = ()

    @property
    def is_own(self) -> bool:
        """A number of the engine's own."""
        return self.field.startswith("@")


@dataclass(frozen=True)
class LogicalGraph:
    """Ops in topological order, the tensors between them, and what enters and leaves.

    results: (name, tensor) that the step reports, such as ("loss", …).
    level: one of LEVELS; the list of passes advances it (pipeline.py).
    """

    ops: tuple[Op, ...]
    tensors: Mapping[str, LogicalTensor]
    variables: tuple[Variable, ...] = ()
    feeds: tuple[Feed, ...] = ()
    _: KW_ONLY
    results: tuple[tuple[str, str], ...] = ()
    level: str = CAPTURED
    notes: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def producer(self) -> Mapping[str, Op]:
        """Tensor name -> the op that makes it; variables and feeds have none."""
        return {name: op for op in self.ops for name in op.makes}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Op, ...]]:
        """Tensor name -> the ops that read it, in order, each once."""
        out: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in dict.fromkeys(op.inputs):
                out.setdefault(name, []).append(op)
        return {name: tuple(ops) for name, ops in out.items()}

    @property
    def sources(self) -> tuple[Variable | Feed, ...]:
        """All that enters: variables, then fields of the batch."""
        return (*self.variables, *self.feeds)

    @cached_property
    def variable_of(self) -> Mapping[str, Variable]:
        """Tensor name -> variable."""
        return {variable.tensor: variable for variable in self.variables}

    def writes(self, op: Op, name: str) -> bool:
        """Return whether an op writes the variable `name`."""
        variable = self.variable_of.get(name)
        return variable is not None and variable.new in op.makes

    @cached_property
    def lives_with(self) -> Mapping[str, str]:
        """Variable -> the parameter whose home it has: a state's, if it is shaped so; else its
        own.
        """
        shapes = {v.name: self.tensors[v.tensor].shape for v in self.variables}
        return {
            v.name: v.of if shapes.get(v.of) == shapes[v.name] else v.name for v in self.variables
        }

    @cached_property
    def of_weights(self) -> frozenset[str]:
        """Variables that last a step, and what a step makes of them alone, before its update."""
        weights = set(self.variable_of) - self.running
        for op in self.ops:
            known = op.inputs and weights.issuperset(op.inputs)
            if known and op.phase != UPDATE:
                weights.update(op.makes)
        return frozenset(weights)

    @cached_property
    def running(self) -> frozenset[str]:
        """Tensors of the variables that forward changes, with every micro-batch."""
        return frozenset(
            v.tensor for v in self.variables if v.new and self.producer[v.new].phase == FORWARD
        )

    def __str__(self) -> str:
        lines = [f"logical graph ({self.level})"]
        lines += [f"  {v.kind} {v.name} = {self._entering(v)}" for v in self.variables]
        lines += [f"  feed {f.field} = {self._entering(f)}" for f in self.feeds]
        lines += [f"  {op}" for op in self.ops]
        lines += [f"  result {name} = %{tensor}" for name, tensor in self.results]
        return "\n".join(lines)

    def _entering(self, source: Variable | Feed) -> str:
        """The tensor of a source; from level laid_out on with where it lives."""
        tensor = str(self.tensors[source.tensor])
        return f"{tensor}  {format_nd_sbp(source.nd_sbp)}" if source.nd_sbp else tensor


def refs(value: object) -> list[Ref]:
    """Every Ref in nested tuples, in order."""
    found: list[Ref] = []
    _add_refs((value,), found)
    return found


def _add_refs(values: tuple[object, ...], found: list[Ref]) -> None:
    """Passes make ops, and so ask for this, all the time: no generators."""
    for value in values:
        if isinstance(value, Ref):
            found.append(value)
        elif isinstance(value, tuple):
            _add_refs(value, found)


def map_refs(value: Any, fn: Callable[[Ref], object]) -> Any:
    """The same nested tuples with fn applied to every Ref."""
    if isinstance(value, Ref):
        return fn(value)
    if isinstance(value, tuple):
        return tuple(map_refs(item, fn) for item in value)
    return value


def replace_inputs(op: Op, names: Iterable[str]) -> Op:
    """Return the op with other inputs, in order of appearance."""
    following = iter(names)
    swap = lambda _: Ref(next(following))  # noqa: E731
    return replace(op, args=map_refs(op.args, swap), kwargs=map_refs(op.kwargs, swap))


def rename_inputs(op: Op, names: Mapping[str, str]) -> Op:
    """The op with inputs renamed; names that are not in the mapping stay."""
    if names.keys().isdisjoint(op.inputs):
        return op
    return replace_inputs(op, [names.get(name, name) for name in op.inputs])


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_show, value))}]"
    return str(value)


def gradient_of(tensor: str) -> str:
    """The parameter whose gradient, accumulated, a tensor is ("grad/w", "grad@1/w"), or ""."""
    kind, _, parameter = tensor.partition("/")
    return parameter if kind.partition("@")[0] == "grad" else ""
