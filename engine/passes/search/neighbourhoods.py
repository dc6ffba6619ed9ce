"""Neighbourhoods of a choice: parts of a network that are small enough to be solved separately.

    one axis    all rows and homes that do not change on any other axis
    ops         all rows of some ops and all homes of their inputs: of a (repeated) block, of a
                module, of two modules that follow each other

A repeated part is solved once, and its copies follow the first.  Only the first and the last one,
which have other neighbours, are solved alone as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flowrun.engine.passes.search.cost_network import Network
from flowrun.engine.passes.search.options import Choice

Ops = tuple[int, ...]
_MODULE_DEPTH = 3  # modules are distinguished by the first names of their path


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """The choices near one choice.

    free: variable -> the values that it may take; other variables stay.  follows: variable -> the
    variable whose value it takes.  max_entries: entries of a table in its elimination.
    """

    free: Mapping[int, Sequence[int]]
    follows: Mapping[int, int] = field(default_factory=dict)
    max_entries: int = 1 << 17


def neighbourhoods(network: Network, best: Choice) -> Iterator[Neighbourhood]:
    """Yield the neighbourhoods of a choice, the largest first."""
    num_axes = len(network.options.rows[0][0])
    for axis in range(num_axes) if num_axes > 1 else ():
        yield _one_axis(network, best, axis)
    parts = OpGroups(network)
    for copies in parts.group_copies():
        yield parts.free_together(copies, best)
        for alone in dict.fromkeys((copies[0], copies[-1])) if len(copies) > 1 else ():
            yield parts.free_ops(alone, best)


def _one_axis(network: Network, best: Choice, axis: int) -> Neighbourhood:
    free: dict[int, Sequence[int]] = {}
    for v, options in enumerate((*network.options.rows, *network.options.homes)):
        now = options[best[v]]
        others = [a for a in range(len(now)) if a != axis]
        free[v] = [k for k, at in enumerate(options) if all(at[a] == now[a] for a in others)]
    free |= _sets(network, best, free, range(len(network.sets)))
    return Neighbourhood(free, max_entries=1 << 20)


class OpGroups:
    """The ops of blocks and modules, with the variables that belong to them."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.source = network.options.variables
        self.sets: dict[int, list[int]] = {}  # op -> sets that it reads
        for k, (_, readers) in enumerate(network.sets):
            for reader in readers:
                if reader.variable is not None:
                    self.sets.setdefault(reader.variable, []).append(k)

    def group_copies(self) -> Iterator[list[Ops]]:
        """Yield every part together with its copies, whose names differ only by a number."""
        modules = self._by_path(lambda path: path[:_MODULE_DEPTH])
        pairs = (
            (f"{one}, {other}", (*modules[one], *modules[other]))
            for one, other in zip(modules, list(modules)[1:], strict=False)
        )
        blocks = self._by_path(_block)
        groups: dict[object, list[Ops]] = {}
        for name, ops in (*blocks.items(), *modules.items(), *pairs):
            kind = re.sub(r"\d+", "*", name), tuple(id(self.network.options.rows[v]) for v in ops)
            groups.setdefault(kind, []).append(ops)
        yield from groups.values()

    def _by_path(self, part_of: Callable[[list[str]], list[str]]) -> dict[str, Ops]:
        by_path: dict[str, list[int]] = {}
        for v, op in enumerate(self.network.options.ops):
            by_path.setdefault(".".join(part_of(op.module.split("."))), []).append(v)
        return {name: tuple(ops) for name, ops in by_path.items()}

    def free_ops(self, ops: Ops, best: Choice) -> Neighbourhood:
        """Return the neighbourhood of all rows of some ops, and all homes of their inputs."""
        free: dict[int, Sequence[int]] = {}
        for v in ops:
            free[v] = range(self.network.sizes[v])
            for name in self.network.options.ops[v].inputs:
                if name in self.source:
                    source = self.source[name]
                    free[source] = range(self.network.sizes[source])
        touched = dict.fromkeys(k for v in ops for k in self.sets.get(v, ()))
        return Neighbourhood({**free, **_sets(self.network, best, free, touched)})

    def free_together(self, copies: Sequence[Ops], best: Choice) -> Neighbourhood:
        """Return the neighbourhood in which all copies are free and follow the first."""
        every = [self.free_ops(ops, best).free for ops in copies]
        free: dict[int, Sequence[int]] = dict(every[0])
        follows: dict[int, int] = {}
        for other in every[1:]:
            pairs = list(zip(every[0], other, strict=False))
            equal = len(every[0]) == len(other)
            for one, v in pairs if equal else ():
                if v not in free and list(every[0][one]) == list(other[v]):
                    follows[v] = one
            free |= {v: values for v, values in other.items() if v not in free}
        return Neighbourhood(free, follows)


def _block(path: list[str]) -> list[str]:
    """Return the path up to the number of a module in a list of modules."""
    numbers = [k for k, name in enumerate(path[:_MODULE_DEPTH]) if name.isdigit()]
    return path[: numbers[-1] + 1] if numbers else path[:_MODULE_DEPTH]


def _sets(
    network: Network, best: Choice, free: Mapping[int, Sequence[int]], some: Iterable[int]
) -> dict[int, Sequence[int]]:
    """Return the sets that the readers' allowed rows may ask for."""
    allowed: dict[int, Sequence[int]] = {}
    for at in some:
        form_set, readers = network.sets[at]
        assert form_set.variable is not None
        asked = [
            dict.fromkeys(r.forms[k] for k in free.get(r.variable, (best[r.variable],)))  # type: ignore[index, arg-type]
            for r in readers
        ]
        possible = frozenset().union(*(f for forms in asked for f in forms))
        certain = frozenset.intersection(*form_set.forms)
        values = [
            k
            for k, forms in enumerate(form_set.forms)
            if forms - certain <= possible
            and all(any(f <= forms for f in options) for options in asked)
        ]
        now = best[form_set.variable]
        allowed[form_set.variable] = values if now in values else [now, *values]
    return allowed
