"""make_network: a graph -> the variables and tables of its layout.

    variables   the row of every op; the home of every weight (its states live with it) and field;
                for a tensor that several ops read, the set of forms in which it exists
    tables      the costs of rows and homes; for each tensor, of boxing it from the form in which it
                is made to all that its readers ask for (boxings.py); and infinite ones that require
                that a reader's form is in the set, and that an update finds its weight at home

Equal tables are one array, so that repeated blocks are solved once (elimination.py).  So are those
of stages alike: the forms of a tensor are on the first stages between which boxings cost the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from flowrun.engine.ir.graph import UPDATE, LogicalGraph, Variable
from flowrun.engine.ops.flow.update import ASSIGN
from flowrun.engine.passes.search.boxings import MAX_ORDERED_FORMS, Boxings
from flowrun.engine.passes.search.cost_network import Network, Term
from flowrun.engine.passes.search.locations import Choices, Locations, LocationsOfRows, unions
from flowrun.engine.passes.search.objective import Array, Objective
from flowrun.engine.passes.search.options import Choice, Options, inputs_of, outputs_of


def make_network(
    graph: LogicalGraph,
    options: Options,
    objective: Objective,
    starts: Iterable[Choice] = (),
    relaxed: bool = False,
) -> Network:
    """Return the network of all ops of a graph.

    starts: rows and homes whose sets are in the network, even if it cannot have all sets.  relaxed:
    build a network that costs no more: of a tensor that has too many sets, each of k readers pays
    1/k of the boxing to its dearest form, by way of any form that some reader may ask for; together
    that is at most what the set costs.
    """
    return _Maker(graph, options, objective, tuple(starts), relaxed).make()


class _TensorEnd(NamedTuple):
    """A maker or reader of a tensor.  forms: a stage -> the tensor's forms there, for each value of
    the variable.
    """

    variable: int
    stage: int
    forms: Callable[[int], tuple[Locations, ...]]


class _Maker:
    def __init__(
        self,
        graph: LogicalGraph,
        options: Options,
        objective: Objective,
        starts: tuple[Choice, ...],
        relaxed: bool,
    ) -> None:
        self.graph = graph
        self.options = options
        self.objective = objective
        self.starts = starts
        self.relaxed = relaxed
        self.home_of = options.variables
        self.sizes = options.sizes
        self.terms: list[Term] = []
        self.sets: list[tuple[Choices, tuple[Choices, ...]]] = []
        self.complete = True
        self.forms, self.boxings = LocationsOfRows(), Boxings(objective)
        self._known: dict[object, Array] = {}
        self._sets: dict[tuple[Locations, ...], tuple[Locations, ...]] = {}
        self._alike: dict[object, tuple[int, ...]] = {}
        self._unions: dict[object, tuple[tuple[Locations, ...], bool]] = {}

    def make(self) -> Network:
        """Return the network."""
        for v, (op, rows) in enumerate(zip(self.options.ops, self.options.rows, strict=True)):
            seconds, held = self.objective.row_seconds(op, rows), self.objective.row_bytes(op, rows)
            self.terms.append(Term((v,), seconds, held, op.stage))
        self._weigh_homes()
        makers = self._makers()
        for name, readers in self._readers().items():
            self._box(name, makers[name], readers)
        self._keep_at_home()
        return Network(
            options=self.options,
            sizes=tuple(self.sizes),
            terms=tuple(self.terms),
            sets=tuple(self.sets),
            complete=self.complete and self.boxings.complete,
        )

    def _weigh_homes(self) -> None:
        """Add the bytes of homes: a state lives with its weight, and on its stage."""
        living: dict[str, list[Variable]] = {}
        for variable in self.graph.variables:
            home = self.options.tied.get(variable.tensor, variable.tensor)
            living.setdefault(home, []).append(variable)
        for name, homes in zip(self.options.sources, self.options.homes, strict=True):
            lives = living.get(name, ())
            held = tuple(sum(self.objective.home_bytes(v, home) for v in lives) for home in homes)
            array = self._known.setdefault(("held", held), np.array(held))
            stage = lives[0].stage if lives else 0
            self.terms.append(Term((self.home_of[name],), np.zeros_like(array), array, stage))

    # ------------------------------------------------------------------ forms

    def _makers(self) -> dict[str, _TensorEnd]:
        """Return where every tensor is made, or lives."""
        out = {}
        for source in self.graph.sources:
            v = self.home_of[self.options.tied.get(source.tensor, source.tensor)]
            homes = self.options.homes[v - len(self.options.ops)]
            out[source.tensor] = _TensorEnd(v, source.stage, partial(self.forms.of_homes, homes))
        for v, (op, rows) in enumerate(zip(self.options.ops, self.options.rows, strict=True)):
            for j, name in enumerate(op.outputs):
                if name is not None:
                    out[name] = _TensorEnd(v, op.stage, partial(self.forms.of_output, rows, j))
        return out

    def _readers(self) -> dict[str, list[_TensorEnd]]:
        """Return the readers of each tensor."""
        out: dict[str, list[_TensorEnd]] = {}
        for v, (op, rows) in enumerate(zip(self.options.ops, self.options.rows, strict=True)):
            inputs = op.inputs
            for name in dict.fromkeys(inputs):
                if self.graph.writes(op, name):
                    continue
                places = tuple(i for i, other in enumerate(inputs) if other == name)
                end = _TensorEnd(v, op.stage, partial(self.forms.of_input, rows, places))
                out.setdefault(name, []).append(end)
        return out

    def _like(self, stages: Iterable[int]) -> dict[int, int]:
        """Return the stages that stand for those of a tensor: the first between which every boxing
        costs as much.
        """
        each = tuple(dict.fromkeys(stages))
        kinds = tuple(self.objective.kind(a, b) for a in each for b in each)
        return dict(zip(each, self._alike.setdefault(kinds, each), strict=True))

    def _keep_at_home(self) -> None:
        for v, (op, rows) in enumerate(zip(self.options.ops, self.options.rows, strict=True)):
            if op.phase != UPDATE and op.target != ASSIGN:
                continue
            for i, name in enumerate(op.inputs):
                if not self.graph.writes(op, name):
                    continue
                j = op.outputs.index(self.graph.variable_of[name].new)
                home = self.home_of[self.options.tied.get(name, name)]
                homes = self.options.homes[home - len(self.options.ops)]
                key = ("home", homes, id(rows), i, j)
                if key not in self._known:
                    ends = [(inputs_of(row)[i], outputs_of(row)[j]) for row in rows]
                    self._known[key] = _forbid_others(
                        [[(h, h) == at for at in ends] for h in homes]
                    )
                self._forbid((home, v), self._known[key])

    def _box(self, name: str, maker_end: _TensorEnd, reader_ends: list[_TensorEnd]) -> None:
        """Add the cost of boxing a tensor to what its readers ask for."""
        like = self._like(end.stage for end in (maker_end, *reader_ends))
        maker, *readers = (
            Choices(end.variable, end.forms(like[end.stage])) for end in (maker_end, *reader_ends)
        )
        begin = len(self.terms)
        self._pay_all(name, maker, readers)
        if stages := {k: stage for stage, k in like.items() if k != stage}:
            for n, term in enumerate(self.terms[begin:], begin):
                self.terms[n] = replace(term, stage=stages.get(term.stage, term.stage))

    def _pay_all(self, name: str, maker: Choices, readers: list[Choices]) -> None:
        if self.objective.auto.sbp_collector:
            self._pay_once(name, maker, readers)
            return
        for reader in readers:
            self._pay(name, maker, reader)

    def _pay_once(self, name: str, maker: Choices, readers: list[Choices]) -> None:
        """Add the cost of the set of forms that all readers together ask for."""
        choosing = [reader for reader in readers if self.forms.is_choice(reader.forms)]
        certain: Locations = frozenset().union(
            *(reader.forms[0] for reader in readers if not self.forms.is_choice(reader.forms))
        )
        if len(choosing) == 1 and not certain:
            self._pay(name, maker, choosing[0])
            return
        key = ("sets", certain, *(id(reader.forms) for reader in choosing))
        if key not in self._unions:
            self._unions[key] = unions(certain, choosing)
        sets, complete = self._unions[key]
        if self.relaxed and not (complete and max(map(len, sets)) <= MAX_ORDERED_FORMS):
            self._pay_shares(name, maker, readers)
            return
        if not choosing:
            self._pay(name, maker, Choices(None, (certain,)))
            return
        if not complete:
            sets = tuple(dict.fromkeys((*sets, *self._sets_of_starts(certain, choosing))))
            sets = self._sets.setdefault(sets, sets)
            self.complete = False
        form_set = Choices(len(self.sizes), sets)
        self.sets.append((form_set, tuple(choosing)))
        self.sizes.append(len(sets))
        self._pay(name, maker, form_set)
        for reader in choosing:
            self._ask(form_set, reader)

    def _pay_shares(self, name: str, maker: Choices, readers: list[Choices]) -> None:
        """Add each reader's share of a bound of what they pay together (see `relaxed`)."""
        ways: Locations = frozenset().union(*(f for r in readers for f in r.forms))
        for reader in readers:
            self._pay(name, maker, reader, 1 / len(readers), ways)

    def _sets_of_starts(
        self, certain: Locations, choosing: Sequence[Choices]
    ) -> Iterator[Locations]:
        """Yield the sets that the starts ask for."""
        for choice in self.starts:
            yield certain.union(*(r.forms[choice[r.number]] for r in choosing))

    def _ask(self, form_set: Choices, reader: Choices) -> None:
        """Require that a reader's forms are in the set."""
        key = ("asked", form_set.forms, reader.forms)
        if key not in self._known:
            self._known[key] = _forbid_others(
                [[f <= e for f in reader.forms] for e in form_set.forms]
            )
        self._forbid((form_set.number, reader.number), self._known[key])

    def _pay(
        self,
        name: str,
        maker: Choices,
        wanted: Choices,
        share: float = 1.0,
        ways: Locations = frozenset(),
    ) -> None:
        """Add the cost, or a share of it, of boxing a tensor to all that is wanted."""
        if maker.variable == wanted.variable is not None:  # an op never reads its own output
            raise AssertionError(name)
        seconds, held = self.boxings.table(name, maker.forms, wanted.forms, ways)
        over = tuple(c.variable for c in (maker, wanted) if c.variable is not None)
        shape = [len(c.forms) for c in (maker, wanted) if c.variable is not None]
        paid = self._take_share(seconds, share, shape)
        for stage, kept in held.items():
            self.terms.append(Term(over, paid, self._take_share(kept, share, shape), stage))
            paid = np.zeros_like(paid)  # once, wherever the copies are

    def _take_share(self, values: Array, share: float, shape: Sequence[int]) -> Array:
        key = ("share", id(values), share, *shape)
        if key not in self._known:
            self._known[key] = (share * values if share != 1 else values).reshape(shape)
        return self._known[key]

    def _forbid(self, over: tuple[int, int], values: Array) -> None:
        self.terms.append(Term(over, values, np.zeros_like(values), 0))


def _forbid_others(legal: Sequence[Sequence[bool]]) -> Array:
    return np.where(np.array(legal), 0.0, math.inf)
