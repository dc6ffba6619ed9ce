"""experiment: an op without a table -> the rows for one axis that hold, tried on small tensors.

A candidate splits dims of equal size in some inputs, or makes some inputs partial sums; each rank
of 2 and of 3 runs the op on its pieces, and what they make says how the outputs lie.  A row is
found if that is so for every size and every kind of numbers: sizes that do not divide, ties, zeros,
both signs, values that equal a number among the arguments (ignore_index).  Integers that spell the
split size are tried as they are, then replaced by the local length.

Not tried: what draws random numbers, writes into its inputs, or makes outputs whose shape depends
on values; what does not run on small tensors of the CPU.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from flowrun.engine.ir.graph import Op
from flowrun.engine.ir.placement import Shape, split_range
from flowrun.engine.ir.sbp import B, P, S, Sbp, Split
from flowrun.engine.ir.signature import (
    LocalCall,
    Signature,
    argument_names,
    bind,
    rebind,
    torch_callable,
)
from flowrun.engine.ir.table import FoundRow, local_call
from flowrun.engine.ops.proof.call_form import CallForm, Letter
from flowrun.engine.ops.proof.simulated_ranks import FAILURES, alike, lay_out, layouts_of, run
from flowrun.engine.ops.proof.values import FLOATS, Draw
from flowrun.engine.torch_internals import OpOverload, schema_of

PARTS = (2, 3)
# Sizes that letters take, the first that the op runs with: three experiments of unlike sizes.
PALETTES = (
    (5, 7, 3, 4, 9, 6, 8, 12, 16, 2),
    (3, 4, 8, 6, 7, 5, 12, 9, 16, 18),
    (7, 5, 9, 12, 8, 6),
)
MOST_ELEMENTS = 1 << 16  # of a tensor that an experiment makes
MOST_CANDIDATES = 400  # layouts of inputs
MOST_MARKS = 8  # numbers among the arguments that values are made to equal
MOST_TENSORS = 16  # inputs of an op that is tried
MOST_LINEAR = 4  # float inputs of an op whose partial sums are tried in every combination

_UNTRIED = frozenset(
    (
        torch.Tag.nondeterministic_seeded,
        torch.Tag.dynamic_output_shape,
        torch.Tag.data_dependent_output,
    )
)

Sizes = Mapping[str, int]
Outputs = tuple[torch.Tensor | None, ...]


def is_tried(target: str) -> bool:
    """True if an op of this target can be tried at all."""
    try:
        operator = torch_callable(target)
    except (AttributeError, RuntimeError):
        return False
    plain = isinstance(operator, OpOverload) and not schema_of(operator).is_mutable
    return plain and _UNTRIED.isdisjoint(operator.tags)


def experiment(form: CallForm, tried: int = 0) -> Iterator[int | FoundRow]:
    """The number of each candidate before it is tried, then the rows that hold.

    tried: candidates that were tried before; number 0 is the op whole.
    """
    if not form.shapes or len(form.shapes) > MOST_TENSORS or not is_tried(form.target):
        return
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield 0
        trials = list(_trials(form))
        distinguishes = [trial.draw.below > 1 for trial in trials]
        if not any(distinguishes) if form.has_positions else not distinguishes:
            return  # positions that are all 0 prove nothing
        candidates = enumerate(itertools.islice(_candidates(form), MOST_CANDIDATES), start=1)
        for number, candidate in candidates:
            if number >= tried:
                yield number
                yield from _rows_of(form, candidate, trials)


# ---- trials --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpTrial:
    """The op with sizes and numbers, and what it makes of them whole."""

    form: CallForm
    sizes: Sizes
    draw: Draw

    @cached_property
    def op(self) -> Op:
        """The op with the sizes."""
        return self.form.op(self.sizes)

    @cached_property
    def inputs(self) -> list[torch.Tensor]:
        """Values of op.inputs."""
        shapes = self.form.shapes_at(self.sizes)
        return [
            self.draw.value(shape, dtype, seed)
            for seed, (shape, dtype) in enumerate(zip(shapes, self.form.dtypes, strict=True))
        ]

    @cached_property
    def made(self) -> Outputs:
        """The outputs.  Raises one of FAILURES if the op does not take the numbers."""
        return self.call(rebind(self.op), self.inputs)

    def call(self, call: LocalCall, inputs: Sequence[torch.Tensor]) -> Outputs:
        """Outputs of a call."""
        outputs = run(call, dict(zip(self.op.inputs, inputs, strict=True)))
        return tuple(value if isinstance(value, torch.Tensor) else None for value in outputs)

    def _again(self) -> Outputs:
        """Return the outputs for the same numbers once more, in another order in memory."""
        call = rebind(self.op)
        if not self.op.target.startswith("aten."):
            turned = [x.mT.contiguous().mT if x.dim() > 1 else x for x in self.inputs]
            with suppress(*FAILURES):
                return self.call(call, turned)
        return self.call(call, self.inputs)

    @property
    def runs(self) -> bool:
        """True if the op takes the numbers."""
        try:
            return len(self.made) == len(self.form.used)
        except FAILURES:
            return False

    @property
    def tells(self) -> bool:
        """True if the op takes the numbers, makes the same of them twice, and numbers at that.

        The second time they lie in memory in another order, which pieces may do too, but for
        torch's own ops, which are of values alone (svd picks other signs by it).
        """
        try:
            return self.runs and all(
                a is None or (b is not None and alike(a, b) and _is_mostly_finite(a))
                for a, b in zip(self.made, self._again(), strict=True)
            )
        except FAILURES:
            return False


def _is_mostly_finite(value: torch.Tensor) -> bool:
    return not value.numel() or float(value.isfinite().double().mean()) > 0.5


def _trials(form: CallForm) -> Iterator[OpTrial]:
    """Sizes times numbers; first, positions in any piece: wrong rows fall before one reads on."""
    for k, sizes in enumerate(_assignments(form)):
        least = min(sizes.values(), default=2)
        draws = [Draw(floats="mixed", below=max(1, least // max(PARTS)))]
        kinds = FLOATS if k == 0 else ("mixed", "ties")
        draws += [Draw(floats=floats, below=least) for floats in kinds]
        if form.has_positions:
            draws.append(Draw(floats="mixed", below=least, ordered=True))
        draws += [Draw(floats="mixed", below=least, mark=mark) for mark in _marks(form, sizes)]
        yield from _telling(form, sizes, draws)


def _marks(form: CallForm, sizes: Sizes) -> list[int | float]:
    """Return numbers that the op is given besides tensors, defaults too.

    It may compare values with them, as ignore_index, padding_idx and threshold do.  A trial that
    the op does not take is dropped.
    """
    given = bind(form.op(sizes)).values()
    numbers = [n for n in given if type(n) in (int, float) and math.isfinite(n)]
    return list(dict.fromkeys(numbers))[:MOST_MARKS]


def _telling(form: CallForm, sizes: Sizes, draws: Sequence[Draw]) -> list[OpTrial]:
    """Return trials in float64, else in the op's own dtypes, else of a definite matrix."""
    for wide in (True, False):
        trials = [OpTrial(form, sizes, replace(draw, wide=wide)) for draw in draws]
        if telling := [trial for trial in trials if trial.tells]:
            return telling
    definite = OpTrial(form, sizes, Draw(floats="definite", below=draws[0].below))
    return [definite] if definite.tells else []


def _assignments(form: CallForm) -> Iterator[Sizes]:
    """Sizes of letters: small ones that the op runs with, else those that it has."""
    seen: list[Sizes] = []
    for palette in PALETTES:
        sizes = _assignment(form, palette)
        if sizes is not None and sizes not in seen:
            seen.append(sizes)
            yield sizes


def _assignment(form: CallForm, palette: Sequence[int]) -> Sizes | None:
    """Small sizes, all unlike: at once if the op runs with them, else one letter after another."""
    actual = dict(form.sizes)
    at_once = dict(zip(actual, palette, strict=False))
    if len(at_once) == len(actual) and _runs(form, at_once):
        return at_once
    sizes = dict(actual)
    for letter in sizes:
        for size in palette:
            taken = {n for other, n in sizes.items() if other != letter}
            if size not in taken and _runs(form, {**sizes, letter: size}):
                sizes[letter] = size
                break
    return sizes if _runs(form, sizes) and _is_small(form, sizes) else None


def _is_small(form: CallForm, sizes: Sizes) -> bool:
    return all(math.prod(shape) <= MOST_ELEMENTS for shape in form.shapes_at(sizes))


def _runs(form: CallForm, sizes: Sizes) -> bool:
    """True if the op takes inputs of these sizes, large ones as shapes alone, which is slower."""
    if _is_small(form, sizes):
        kinds = (("positive", True), ("positive", False), ("definite", True))
        draws = (Draw(floats=floats, below=1, wide=wide) for floats, wide in kinds)
        return any(OpTrial(form, sizes, draw).runs for draw in draws)
    op = form.op(sizes)
    like = zip(form.shapes_at(sizes), form.dtypes, strict=True)
    try:
        inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in like]
        run(rebind(op), dict(zip(op.inputs, inputs, strict=True)))
    except FAILURES:
        return False
    return True


# ---- candidates ----------------------------------------------------------------------------------


def _candidates(form: CallForm) -> Iterator[FoundRow]:
    """Rows without outputs.

    Splits first: of one size in as many inputs as have it, then in fewer; then partial sums.
    """
    for letter in dict.fromkeys(n for dims in form.shapes for n in dims if isinstance(n, Letter)):
        at = [[d for d, n in enumerate(dims) if n == letter] for dims in form.shapes]
        options: list[list[Sbp]] = [[*map(S, dims), B] for dims in at]
        layouts = sorted(itertools.islice(itertools.product(*options), 4096), key=_preference)
        for layout in layouts:
            if any(isinstance(sbp, Split) for sbp in layout):
                for sizes in _replacements(form, letter):
                    yield FoundRow(Signature(layout, ()), sizes)
    for layout in _partial_layouts(form.dtypes):
        yield FoundRow(Signature(layout, ()))


def _preference(layout: tuple[Sbp, ...]) -> tuple[int, int]:
    """Sort a layout that splits one dim in all inputs that have it before others."""
    dims = [sbp.dim for sbp in layout if isinstance(sbp, Split)]
    return -len(dims), len(set(dims))


def _replacements(form: CallForm, letter: Letter) -> Iterator[tuple[tuple[str, int], ...]]:
    """None, all, or one of the integers that are this size."""
    names = argument_names(form.target)
    given = [*zip(names, form.args, strict=False), *form.kwargs]
    places = []
    for name, value in given:
        if value == letter:
            places.append((name, -1))
        elif isinstance(value, tuple):
            places += [(name, at) for at, item in enumerate(value) if item == letter]
    yield ()
    if places:
        yield tuple(places)
    if len(places) > 1:
        yield from ((place,) for place in places)


def _partial_layouts(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[Sbp, ...]]:
    floats = [k for k, dtype in enumerate(dtypes) if dtype.is_floating_point or dtype.is_complex]
    few = len(floats) <= MOST_LINEAR
    for size in range(1, len(floats) + 1) if few else (1, len(floats)):
        for group in itertools.combinations(floats, size):
            yield tuple(P if k in group else B for k in range(len(dtypes)))


# ---- a candidate on trial ------------------------------------------------------------------------

Fit = tuple[Sbp, bool]  # of an output: its SBP; whether it is multiplied by the rank's share


def _rows_of(form: CallForm, candidate: FoundRow, trials: Sequence[OpTrial]) -> list[FoundRow]:
    """Rows with these inputs: the layouts of outputs that every trial leaves."""
    divisions = [(trial, parts) for trial in trials for parts in _parts(candidate, trial)]
    fits: list[list[Fit]] | None = None
    for trial, parts in divisions:
        fits = _fits(candidate, trial, parts, fits)
        if fits is None or [] in itertools.compress(fits, form.used):
            return []
    if fits is None or not _splits_unevenly(candidate, divisions):
        return []
    options = [
        each if used else (each or [(B, False)])[:1]
        for each, used in zip(fits, form.used, strict=True)
    ]
    return [
        replace(
            candidate,
            signature=Signature(candidate.signature.inputs, tuple(sbp for sbp, _ in outputs)),
            means=tuple(k for k, (_, mean) in enumerate(outputs) if mean),
        )
        for outputs in itertools.product(*options)
    ]


def _splits_unevenly(candidate: FoundRow, divisions: Sequence[tuple[OpTrial, int]]) -> bool:
    """True if a trial leaves a remainder or splits nothing: an even split alone proves little."""
    rests = [n % parts for trial, parts in divisions for n in _lengths(candidate, trial)]
    return not rests or any(rests)


def _lengths(candidate: FoundRow, trial: OpTrial) -> list[int]:
    pairs = zip(trial.inputs, candidate.signature.inputs, strict=True)
    return [value.shape[sbp.dim] for value, sbp in pairs if isinstance(sbp, Split)]


def _parts(candidate: FoundRow, trial: OpTrial) -> list[int]:
    """Numbers of ranks that this trial can be split over, one of them unevenly if that can be."""
    lengths = _lengths(candidate, trial)
    if not lengths:
        return list(PARTS)
    least = min(lengths)
    parts = [n for n in PARTS if n <= least]
    if all(least % n == 0 for n in parts) and least > 3:
        parts.append(least - 1)
    return parts


def _fits(
    candidate: FoundRow, trial: OpTrial, parts: int, before: list[list[Fit]] | None
) -> list[list[Fit]] | None:
    """Return for each output how the pieces that the ranks make lie; None if a rank fails.

    before: what earlier trials left.
    """
    pairs = zip(trial.inputs, candidate.signature.inputs, strict=True)
    laid = [lay_out(value, (sbp,), (parts,)) for value, sbp in pairs]
    shapes = [tuple(value.shape) for value in trial.inputs]
    by_rank: list[Outputs] = []
    try:
        for rank in range(parts):
            inputs = [pieces[rank,] for pieces in laid]
            local = local_call(trial.op, [(candidate, shapes, [tuple(x.shape) for x in inputs])])
            by_rank.append(trial.call(local, inputs))
        shares = _shares(candidate, shapes, parts)
        return [
            _output_fits(whole, pieces, shares, before[k] if before else None)
            for k, (whole, *pieces) in enumerate(zip(trial.made, *by_rank, strict=True))
        ]
    except FAILURES:
        return None


def _shares(row: FoundRow, shapes: Sequence[Shape], parts: int) -> list[float]:
    """Return each rank's share of the dim that is split; none where nothing is."""
    if not any(isinstance(sbp, Split) for sbp in row.signature.inputs):
        return []
    tensor, dim = row.anchor
    size = shapes[tensor][dim]
    return [split_range(size, parts, rank)[1] / size for rank in range(parts)]


def _output_fits(
    whole: torch.Tensor | None,
    pieces: Sequence[torch.Tensor | None],
    shares: Sequence[float],
    before: list[Fit] | None,
) -> list[Fit]:
    """Return layouts of an output as it is, or else multiplied by the share."""
    among = [sbp for sbp, _ in before] if before else None
    parts = len(pieces)
    if not before or not before[0][1]:
        plain = layouts_of(whole, list(pieces), parts, among)
        if plain or before:
            return [(sbp, False) for sbp in plain]
    if not shares or whole is None or not whole.is_floating_point():
        return []
    scaled = [None if p is None else p * s for p, s in zip(pieces, shares, strict=True)]
    return [(sbp, True) for sbp in layouts_of(whole, scaled, parts, among)]
