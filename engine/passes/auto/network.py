"""Network: a layout problem as variables and tables over them (passes/elimination.py).

    variables   the row of every op; the home of every weight (its states live with it) and field;
                for a tensor that several ops read, the set of forms in which it is there
    tables      what rows and homes cost; for each tensor, to box it from the form in which it is
                made to all that its readers ask for, each once, in the best order; and infinite
                ones: a reader's form is in the set, an update finds its weight at home

Every table has seconds and bytes, so that their weights can change without making it anew.
Equal blocks share the arrays of their tables.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrun.engine.graph import UPDATE, Feed, LogicalGraph, Op, Variable
from flowrun.engine.passes.auto.objective import Array, Form, Objective
from flowrun.engine.passes.auto.rows import Row, Rows, inputs_of, outputs_of
from flowrun.engine.passes.elimination import Table
from flowrun.engine.sbp import B, NdSbp

ASSIGN = "flow.assign"
MOST_SETS = 400  # forms of one tensor that are there together: sets that are tried
MOST_ORDERED = 6  # forms whose boxings are tried in every order

Forms = frozenset[Form]


@dataclass(frozen=True, slots=True)
class Term:
    """A table in two currencies."""

    over: tuple[int, ...]
    seconds: Array
    bytes: Array

    def weighed(self, byte_s: float) -> Table:
        """In seconds; byte_s: of a held byte."""
        return Table(self.over, self.seconds + byte_s * self.bytes if byte_s else self.seconds)


@dataclass(frozen=True, slots=True)
class Choices:
    """The forms of one tensor behind each value of a variable (None: there is one value)."""

    variable: int | None
    forms: tuple[Forms, ...]


@dataclass(frozen=True)
class Network:
    """What is chosen and what it costs.

    rows: of each op.  sources: tensors of weights and fields, with their homes.  sizes: of every
    variable: ops, sources, then sets.  sets: of tensors that several ops read, with the readers.
    complete: False where some tensor's sets, or orders of boxings, are not all there.
    """

    ops: tuple[Op, ...]
    rows: tuple[tuple[Row, ...], ...]
    sources: tuple[str, ...]
    homes: tuple[tuple[NdSbp, ...], ...]
    sizes: tuple[int, ...]
    terms: tuple[Term, ...]
    sets: tuple[tuple[Choices, tuple[Choices, ...]], ...]
    complete: bool

    def tables(self, byte_s: float = 0.0) -> list[Table]:
        """All terms, in seconds."""
        return [term.weighed(byte_s) for term in self.terms]

    def cost(self, choice: Sequence[int]) -> tuple[float, float]:
        """(seconds, bytes) of a choice."""
        at = [tuple(choice[v] for v in term.over) for term in self.terms]
        pairs = list(zip(self.terms, at, strict=True))
        return (
            math.fsum(float(term.seconds[where]) for term, where in pairs),
            math.fsum(float(term.bytes[where]) for term, where in pairs),
        )


def network(
    graph: LogicalGraph, rows_of: Rows, objective: Objective, relaxed: bool = False
) -> Network:
    """Of all ops of a graph.

    relaxed: one that costs no more, and has no sets: of a tensor with k readers each pays 1/k of
    what it would alone, which together is at most what the dearest of them pays.
    """
    return _Maker(graph, rows_of, objective, relaxed).made()


class _Maker:
    def __init__(
        self, graph: LogicalGraph, rows_of: Rows, objective: Objective, relaxed: bool
    ) -> None:
        self.graph = graph
        self.relaxed = relaxed
        self.objective = objective
        self.ops = graph.ops
        self.rows = tuple(map(rows_of.of, graph.ops))
        by_name = {v.name: v.tensor for v in graph.variables}
        self.tied = {  # a state lives with its parameter
            v.tensor: by_name[v.of]
            for v in graph.variables
            if v.kind == "state" and v.of in by_name
        }
        free: list[Variable | Feed] = [v for v in graph.variables if v.tensor not in self.tied]
        free += graph.feeds
        self.sources = tuple(source.tensor for source in free)
        self.homes = tuple(map(rows_of.homes, free))
        self.variable_of = {name: len(self.ops) + k for k, name in enumerate(self.sources)}
        self.sizes = [*map(len, self.rows), *map(len, self.homes)]
        self.terms: list[Term] = []
        self.sets: list[tuple[Choices, tuple[Choices, ...]]] = []
        self.complete = True
        self._known: dict[Any, Any] = {}

    def made(self) -> Network:
        for v, (op, rows) in enumerate(zip(self.ops, self.rows, strict=True)):
            seconds, held = self.objective.row_seconds(op, rows), self.objective.row_bytes(op, rows)
            self.terms.append(Term((v,), seconds, held))
        self._weigh_homes()
        makers, readers = self._makers(), self._readers()
        for name, asking in readers.items():
            self._boxings(name, makers[name], asking)
        self._keep_at_home()
        return Network(
            self.ops,
            self.rows,
            self.sources,
            self.homes,
            tuple(self.sizes),
            tuple(self.terms),
            tuple(self.sets),
            self.complete,
        )

    def _weigh_homes(self) -> None:
        living: dict[str, list[Variable]] = {}
        for variable in self.graph.variables:
            home = self.tied.get(variable.tensor, variable.tensor)
            living.setdefault(home, []).append(variable)
        for name, homes in zip(self.sources, self.homes, strict=True):
            held = [
                sum(self.objective.home_bytes(v, home) for v in living.get(name, ()))
                for home in homes
            ]
            self.terms.append(Term((self.variable_of[name],), np.zeros(len(homes)), np.array(held)))

    # ------------------------------------------------------------------ forms

    def _makers(self) -> dict[str, Choices]:
        """The forms in which every tensor is made, or lives."""
        entering: tuple[Variable | Feed, ...] = (*self.graph.variables, *self.graph.feeds)
        stages = {source.tensor: source.stage for source in entering}
        out = {}
        for name, stage in stages.items():
            home = self.tied.get(name, name)
            v = self.variable_of[home]
            forms = tuple(frozenset(((stage, h),)) for h in self.homes[v - len(self.ops)])
            out[name] = Choices(v, forms)
        for v, (op, rows) in enumerate(zip(self.ops, self.rows, strict=True)):
            for made, forms in zip(op.outputs, self._made_forms(op, rows), strict=True):
                if made is not None:
                    out[made] = Choices(v, forms)
        return out

    def _made_forms(self, op: Op, rows: tuple[Row, ...]) -> list[tuple[Forms, ...]]:
        made = [outputs_of(row) for row in rows]
        return [
            tuple(frozenset(((op.stage, outs[j]),)) for outs in made)
            for j in range(len(op.outputs))
        ]

    def _readers(self) -> dict[str, list[Choices]]:
        """What every reader of each tensor asks for, by its rows."""
        out: dict[str, list[Choices]] = {}
        for v, (op, rows) in enumerate(zip(self.ops, self.rows, strict=True)):
            inputs = op.inputs
            read = [inputs_of(row) for row in rows]
            for name in dict.fromkeys(inputs):
                if self._is_changed(op, name):
                    continue
                at = [i for i, other in enumerate(inputs) if other == name]
                forms = tuple(frozenset((op.stage, ins[i]) for i in at) for ins in read)
                out.setdefault(name, []).append(Choices(v, forms))
        return out

    def _is_changed(self, op: Op, name: str) -> bool:
        """True if the op writes the variable: it reads it at home and leaves it there."""
        variable = self.graph.variable_of.get(name)
        return variable is not None and variable.new in op.makes

    # ------------------------------------------------------------------ tables

    def _keep_at_home(self) -> None:
        for v, (op, rows) in enumerate(zip(self.ops, self.rows, strict=True)):
            if op.phase != UPDATE and op.target != ASSIGN:
                continue
            for i, name in enumerate(op.inputs):
                if not self._is_changed(op, name):
                    continue
                j = op.outputs.index(self.graph.variable_of[name].new)
                home = self.variable_of[self.tied.get(name, name)]
                homes = self.homes[home - len(self.ops)]
                legal = [
                    [h == inputs_of(row)[i] == outputs_of(row)[j] for row in rows] for h in homes
                ]
                self.terms.append(_forbid((home, v), np.array(legal)))

    def _boxings(self, name: str, maker: Choices, readers: list[Choices]) -> None:
        if self.relaxed or not self.objective.auto.shared:
            shared = self.objective.auto.shared
            ways: Forms = frozenset().union(*(f for r in readers for f in r.forms))
            for reader in readers:
                if shared:
                    self._paid(name, maker, reader, 1 / len(readers), ways)
                else:
                    self._paid(name, maker, reader)
            return
        choosing = [reader for reader in readers if len(set(reader.forms)) > 1]
        certain: Forms = frozenset().union(
            *(reader.forms[0] for reader in readers if len(set(reader.forms)) == 1)
        )
        if not choosing:
            self._paid(name, maker, Choices(None, (certain,)))
        elif len(choosing) == 1 and not certain:
            self._paid(name, maker, choosing[0])
        else:
            sets = self._unions(certain, choosing)
            there = Choices(len(self.sizes), sets)
            self.sets.append((there, tuple(choosing)))
            self.sizes.append(len(sets))
            self._paid(name, maker, there)
            for reader in choosing:
                self._asked(there, reader)

    def _asked(self, there: Choices, reader: Choices) -> None:
        """A reader's forms are among those that are there."""
        key = ("asked", there.forms, reader.forms)
        if key not in self._known:
            distinct = {forms: k for k, forms in enumerate(dict.fromkeys(reader.forms))}
            legal = np.array([[f <= every for f in distinct] for every in there.forms])
            self._known[key] = legal[:, [distinct[forms] for forms in reader.forms]]
        assert there.variable is not None and reader.variable is not None
        self.terms.append(_forbid((there.variable, reader.variable), self._known[key]))

    def _paid(
        self,
        name: str,
        maker: Choices,
        wanted: Choices,
        share: float = 1.0,
        ways: Forms = frozenset(),
    ) -> None:
        """What it costs to box a tensor to all that is wanted, from where it is made, perhaps by
        way of other forms.
        """
        tensor, objective = self.graph.tensors[name], self.objective
        key = (
            tensor.shape,
            tensor.dtype,
            objective.box_times(name),
            objective.copy_bytes(name, next(iter(maker.forms[0]))) > 0,
            maker.forms,
            wanted.forms,
            ways,
        )
        if key not in self._known:
            self._known[key] = self._prices(name, maker.forms, wanted.forms, ways)
        seconds, held = self._known[key]
        hidden = objective.hidden.get(name, 0.0)
        if hidden:
            seconds = np.maximum(seconds - hidden, 0.0)
        if maker.variable == wanted.variable is not None:  # reads what it makes: never
            raise AssertionError(name)
        if share != 1.0:
            seconds, held = share * seconds, share * held
        over = tuple(c.variable for c in (maker, wanted) if c.variable is not None)
        shape = [len(c.forms) for c in (maker, wanted) if c.variable is not None]
        self.terms.append(Term(over, seconds.reshape(shape), held.reshape(shape)))

    def _prices(
        self, name: str, made: Sequence[Forms], wanted: Sequence[Forms], ways: Forms
    ) -> tuple[Array, Array]:
        have_at = {forms: k for k, forms in enumerate(dict.fromkeys(made))}
        want_at = {forms: k for k, forms in enumerate(dict.fromkeys(wanted))}
        seconds = np.zeros((len(have_at), len(want_at)))
        held = np.zeros_like(seconds)
        objective = self.objective
        every = list(dict.fromkeys(f for forms in (*have_at, *want_at, ways) for f in forms))
        copies = {form: objective.copy_bytes(name, form) for form in every}
        price = {f: {g: objective.box_seconds(name, f, g) for g in every} for f in every}
        for way in ways:
            for f in every:
                to = price[f]
                for g in every:
                    to[g] = min(to[g], to[way] + price[way][g])
        times = objective.box_times(name)
        known: dict[tuple[Forms, Forms], float] = {}
        for have, i in have_at.items():
            for forms, j in want_at.items():
                missing = forms - have
                self.complete &= len(missing) <= MOST_ORDERED
                seconds[i, j] = times * _least(price, have, missing, known)
                held[i, j] = sum(copies[form] for form in missing)
        at = np.ix_([have_at[f] for f in made], [want_at[f] for f in wanted])
        return seconds[at], held[at]

    def _unions(self, certain: Forms, readers: Iterable[Choices]) -> tuple[Forms, ...]:
        """Every set of forms that readers may together ask for; where they are too many, those of
        the fewest forms, and B in all is always among them.
        """
        options = [tuple(dict.fromkeys(reader.forms)) for reader in readers]
        if math.prod(map(len, options)) <= 64 * MOST_SETS:
            sets = {certain: None}
            for forms in options:
                sets = dict.fromkeys(s | f for s in sets for f in forms)
            if len(sets) <= MOST_SETS:
                return tuple(sets)
        self.complete = False
        return self._small_unions(certain, options)

    def _small_unions(
        self, certain: Forms, options: Sequence[tuple[Forms, ...]]
    ) -> tuple[Forms, ...]:
        every = list(dict.fromkeys(form for forms in options for f in forms for form in f))
        sets: dict[Forms, None] = {}
        for size in (1, 2, 3):
            if math.comb(len(every), size) + len(sets) > MOST_SETS and sets:
                break
            for some in itertools.combinations(every, size):
                there = certain | frozenset(some)
                if all(any(f <= there for f in forms) for forms in options):
                    sets[there] = None
        whole = {(form[0], (B,) * len(form[1])) for form in every}
        sets[certain | frozenset(whole)] = None
        return tuple(sets)


def _forbid(over: tuple[int, ...], legal: Array) -> Term:
    return Term(over, np.where(legal, 0.0, math.inf), np.zeros(legal.shape))


def _least(
    price: Mapping[Form, Mapping[Form, float]],
    have: Forms,
    missing: Forms,
    known: dict[tuple[Forms, Forms], float],
) -> float:
    """Least seconds of boxing to several forms, in any order: each from any that is there.  known:
    what was found before; it grows.
    """
    if not missing:
        return 0.0
    key = (have, missing)
    if key not in known:
        lasts: Iterable[Form] = missing
        if len(missing) > MOST_ORDERED:
            lasts = [max(missing, key=lambda f: (min(price[h][f] for h in have), str(f)))]
        known[key] = min(
            _least(price, have, missing - {f}, known)
            + min(price[h][f] for h in have | missing if h != f)
            for f in lasts
        )
    return known[key]
