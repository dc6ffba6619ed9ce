"""graph_breaks: a program cut into pieces, at lines that are not built.

Compiled and plain pieces alternate.  A line goes to the first piece of its kind that follows the
pieces of its inputs, and the pieces that read a value which it changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flowrun.engine.ir.graph import Ref, map_refs
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ops.traits import has, is_view
from flowrun.engine.runtime.kernels.program import Program, ProgramCall
from flowrun.engine.torch_internals import OpOverload


@dataclass(frozen=True, slots=True)
class GraphPiece:
    """A piece of a program.

    program: the piece as a program with its own numbers.
    reads, makes: numbers, in the whole program, of its inputs and results.
    plain: the piece is not built.
    """

    program: Program
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    plain: bool


def split(program: Program, templates: bool = False) -> tuple[GraphPiece, ...]:
    """Return the pieces of a program.  templates: what is built has products in it, too."""
    lines: dict[int, list[ProgramCall]] = {}
    for line, at in zip(program.lines, _places(program), strict=True):
        lines.setdefault(at, []).append(line)
    wanted = set(program.results)
    pieces: list[GraphPiece] = []
    for at in sorted(lines, reverse=True):
        piece = _piece(lines[at], wanted, bool(at % 2) or not _is_fusible(lines[at], templates))
        wanted.update(piece.reads)
        pieces.append(piece)
    return tuple(reversed(pieces))


def _is_fusible(lines: list[ProgramCall], templates: bool) -> bool:
    """Return whether there is something to fuse: without templates products call a library, and
    views do no work.
    """
    functions = [line.call.function for line in lines]
    if not all(isinstance(function, OpOverload) for function in functions):
        return True
    names = map(str, functions)
    library = [is_view(name) or (has(name, Trait.PRODUCT) and not templates) for name in names]
    return library.count(False) > 1


def _places(program: Program) -> list[int]:
    """Return the number of each line's piece; even pieces are built."""
    written = dict.fromkeys(range(program.reads), 0)  # value -> piece that made or last changed it
    read = dict(written)  # value -> last piece that reads it
    places = []
    for line in program.lines:
        earlier = [written[k] for k in line.reads] + [read[k] for k in line.changes]
        at = max(earlier, default=0)
        at += (at + line.plain) % 2
        for k in line.reads:
            read[k] = max(read[k], at)
        for number in (*line.outputs, *line.changes):
            if number is not None:
                written[number] = read[number] = at
        places.append(at)
    return places


def _piece(lines: list[ProgramCall], wanted: set[int], plain: bool) -> GraphPiece:
    values = [k for line in lines for k in line.outputs if k is not None]
    inside = set(values)
    reads = tuple(dict.fromkeys(k for x in lines for k in x.reads if k not in inside))
    makes = tuple(k for k in values if k in wanted)
    numbers = {k: i for i, k in enumerate((*reads, *values))}
    renamed = tuple(_renumber(line, numbers) for line in lines)
    program = Program(len(reads), renamed, tuple(numbers[k] for k in makes))
    return GraphPiece(program, reads, makes, plain)


def _renumber(line: ProgramCall, numbers: Mapping[int, int]) -> ProgramCall:
    """Return the line with other numbers of values, and of plain strides: the next pieces are built
    for row-major inputs.
    """

    def rename(ref: Ref) -> Ref:
        return Ref(str(numbers[int(ref.name)]))

    args, kwargs = (map_refs(given, rename) for given in (line.call.args, line.call.kwargs))
    return ProgramCall(
        replace(line.call, args=args, kwargs=kwargs),
        tuple(None if k is None else numbers[k] for k in line.outputs),
        line.single,
        tuple(numbers[k] for k in line.changes),
        plain=line.plain,
        into=None if line.into is None else numbers[line.into],
    )
