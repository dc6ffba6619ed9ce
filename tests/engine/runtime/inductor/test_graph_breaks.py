import weakref
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrun.engine.ir.graph import Ref
from flowrun.engine.ir.signature import LocalCall
from flowrun.engine.runtime.inductor.built import BuiltPiece, Chain
from flowrun.engine.runtime.inductor.graph_breaks import split
from flowrun.engine.runtime.kernels.kernels import emit
from flowrun.engine.runtime.kernels.program import Program, ProgramCall


def mixed(*values: torch.Tensor) -> torch.Tensor:
    return sum(value * (k + 2) for k, value in enumerate(values)) + 1  # type: ignore[return-value]


def changed(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return value.mul_(3).add_(other)


@st.composite
def programs(draw: Any) -> Program:
    """Lines that make a value of earlier ones, or change one; some of them plain."""
    reads = draw(st.integers(1, 3))
    count, lines = reads, []
    for _ in range(draw(st.integers(1, 8))):
        known = st.integers(0, count - 1)
        plain = draw(st.booleans())
        if draw(st.booleans()):
            target, other = draw(known), draw(known)
            refs = (Ref(str(target)), Ref(str(other)))
            if target != other:
                lines.append(
                    ProgramCall(LocalCall(changed, refs), (None,), True, (target,), plain=plain)
                )
        else:
            refs = tuple(Ref(str(k)) for k in draw(st.lists(known, min_size=1, max_size=3)))
            lines.append(ProgramCall(LocalCall(mixed, refs), (count,), True, (), plain=plain))
            count += 1
    results = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4))
    return Program(reads, tuple(lines), tuple(results))


@given(programs())
def test_pieces_together_do_what_the_program_does(program: Program) -> None:
    start = [torch.tensor(float(k + 1), dtype=torch.float64) for k in range(program.reads)]
    whole, parts = ([value.clone() for value in start] for _ in range(2))
    kept = list(whole), list(parts)
    pieces = split(program)
    chain = Chain(program, [(BuiltPiece(p, (), ""), emit(p.program)) for p in pieces])
    assert emit(program)(whole) == chain(parts)
    assert kept[0] == kept[1], "variables end as they should"
    assert not whole and not parts, "the lists of inputs are emptied"


@given(programs())
def test_every_line_is_in_one_piece_of_its_kind(program: Program) -> None:
    pieces = split(program)
    inside = [line for piece in pieces for line in piece.program.lines]
    assert len(inside) == len(program.lines)
    assert all(piece.plain for piece in pieces for x in piece.program.lines if x.plain)


def test_a_value_is_dropped_before_the_piece_that_reads_it_last_runs() -> None:
    """The piece's own list is then its only owner, and code frees it as it goes."""
    gone: list[bool] = []

    def drop(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        seen = weakref.ref(values[0])
        values.clear()
        gone.append(seen() is None)
        return (torch.ones(3),)

    program = Program(1, (ProgramCall(LocalCall(mixed, (Ref("0"),)), (1,), True),), (1,))
    (piece,) = split(program)
    Chain(program, [(BuiltPiece(piece, (), ""), drop)])([torch.ones(3)])
    assert gone == [True]
