"""OpInfo says what is known of one op.  A family's file gives one for each of its targets.

registry.py finds them by target; an op that no family has is OpInfo(), of which nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum

from flowrun.engine.ir.expansion import Expansion, ReducedDims
from flowrun.engine.ir.graph import Op, Ref
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ir.signature import Function, Local, Rule, Signature


class Trait(Enum):
    """A property that an op has or lacks."""

    IDENTITY = "the output is the first input; the runtime runs nothing"
    VIEW = "the output shows the first input, though torch's schema does not say so"
    RESHAPE = "the elements get another shape and keep their order"
    POINTWISE = "works element by element, with broadcasting"
    ROW_STATISTICS = "reduces each row and uses the result in the same kernel"
    ALLOCATES = "the result is memory of its own"
    ALIASES = "the result shows everything that the op reads, each element once"
    SUM = "runs with every micro-batch and makes one value a step"
    IN_PLACE = "the new values are the variables, changed where they are"
    FUSED = "one kernel over weight, gradient and states"
    PLAIN = "never compiled: fused by hand, reads values, has no fixed shape, or sums in an order"
    PRODUCT = "a matrix product, attention or convolution of forward"
    CONSTANT = "a value that is part of the op; any rank can make any piece of it"


class ProductKind(Enum):
    """A kind of products, each with its share of a device's peak (hardware/hardware.py)."""

    MATRIX = "a matrix product"
    BATCHED = "a matrix product with batch dims"
    ATTENTION = "scaled dot product attention"
    CONVOLUTION = "a convolution"


CostPart = tuple[float, Op, Sequence[Shape], Sequence[Shape]]


def cost_part(op: Op, target: str, times: float, *shapes: Shape, like: str) -> CostPart:
    """Return a part of an op: how often another op runs.  shapes: of its inputs and its output.
    like: the tensor that has the dtype of all.
    """
    args = (Ref(like),) * len(shapes[1:])
    made = replace(op, target=target, args=args, outputs=(like,))
    return times, made, shapes[:-1], shapes[-1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """An op may cost more, or less, than to read its inputs and write its outputs once.

    product: the kind of its products; None: none, or products at forward's speed.
    flops: (op, shapes of inputs, shapes of outputs) on one rank -> floating-point operations of its
        products, a multiply-add counted as 2; None: 0.
    seen: (op, shapes of inputs, keys in a block) on one rank -> share of these that kernels compute
        which leave out the blocks of keys that a causal mask hides; None: all of them.
    moved_bytes: (op, bytes of each input, bytes of each output) -> bytes read and written; None:
        their sum.
    seconds: (shapes of inputs, shapes of outputs) on one rank -> seconds of its kernels, as a user
        gives them; None: they follow from all the rest.
    parts: (op, shapes of inputs) on one rank -> the ops that take its seconds: how often each, and
        shapes of its inputs and outputs; None: it is one kernel.
    scratch_bytes: bytes moved in between, per element of the first output, where no single kernel
        does it all (on a CPU).
    counted_input: the input whose elements `hardware.elements_per_s` counts; None: the elements of
        the first output.
    adds_bias: the product adds a bias (`hardware.bias_apart`).
    held_bytes: (op, shapes of inputs, bytes of an element of the first) on one rank -> what it
        holds while it runs, besides inputs and outputs; None: nothing.
    """

    product: ProductKind | None = None
    flops: Callable[[Op, Sequence[Shape], Sequence[Shape | None]], float] | None = None
    seen: Callable[[Op, Sequence[Shape], int], float] | None = None
    moved_bytes: Callable[[Op, Sequence[int], Sequence[int]], float] | None = None
    seconds: Callable[[Sequence[Shape], Sequence[Shape | None]], float] | None = None
    parts: Callable[[Op, Sequence[Shape]], Iterable[CostPart]] | None = None
    scratch_bytes: float = 0.0
    counted_input: int | None = None
    adds_bias: bool = False
    held_bytes: Callable[[Op, Sequence[Shape], int], int] | None = None


@dataclass(frozen=True, slots=True)
class OutVariant:
    """An op may write its result over one of its arguments.

    overload: called as the op, with the argument `name` that it writes into.  We rely on torch for
        this: the device has a kernel of its own for the overload; others, such as relu.out, make a
        new tensor and copy it.
    over: positions of the arguments that the result may be written over.
    along_rows: called (…, dim, flag); its kernels read a row before they write it, or each element
        just before they write it, if rows lie one after the other.
    """

    overload: Function
    name: str = "out"
    over: tuple[int, ...] = (0,)
    along_rows: bool = False


LABELS, IDS, INDICES = ("label", "classes"), ("id", "rows of a table"), ("index", "elements")


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUp:
    """An op reads or writes a tensor at positions that another one says, which must be in range.

    table, ids: names of the two arguments.
    dim: of the table, or the name of the argument that says it.
    words: what the positions are, and what they are out of, for an error.
    ignored: name of the argument with an id that counts for nothing; empty: there is none.
    by_mask: a split table is looked up by a mask, so that an id out of range would pass unseen.
    """

    table: str
    ids: str
    dim: int | str
    words: tuple[str, str]
    ignored: str = ""
    by_mask: bool = False


@dataclass(frozen=True, slots=True)
class Expands:
    """An op that reduces statistics inside is written as ordinary ops (expansion.py).

    argument: name of the tensor argument that is reduced.
    dims: (op, tensors by name) -> the dims of it that are reduced.
    write: writes the ops.
    """

    argument: str
    dims: ReducedDims
    write: Callable[[Expansion], None]


@dataclass(frozen=True, slots=True)
class OpInfo:
    """The project knows this of one op.

    rule: its rows, for one axis; None: it runs whole on every rank (or the op brings a table).
    local: what one rank runs in place of the op; None: the op itself, on its pieces.
    function: of the engine's own ops, what the op does to whole tensors; None: torch's op.
    arguments: of the engine's own ops, names of the arguments, where something asks for them.
    traits: properties that it has.
    out: how it writes over an argument; None: it does not.
    looks_up: the positions that are checked first (capture/rewrites/check_ranges.py).
    expands: how an op that reduces inside is written as ordinary ops; None: no row of it does.
    relabels: of the ops that lead into and out of the mirrored view, how the pieces are read
        differently; no row of theirs holds as a function of a logical tensor.
    """

    rule: Rule | None = None
    _: KW_ONLY
    local: Local | None = None
    function: Function | None = None
    arguments: tuple[str, ...] = ()
    traits: tuple[Trait, ...] = ()
    out: OutVariant | None = None
    looks_up: LookUp | None = None
    cost: OpCost = OpCost()
    expands: Expands | None = None
    relabels: Signature | None = None
