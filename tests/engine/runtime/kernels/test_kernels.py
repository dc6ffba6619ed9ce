import weakref
from typing import Any

import torch

from flowrun.engine.ir.graph import Ref
from flowrun.engine.ir.signature import LocalCall
from flowrun.engine.runtime.kernels.kernels import emit
from flowrun.engine.runtime.kernels.program import Program, ProgramCall

aten = torch.ops.aten


def ref(number: int) -> Ref:
    return Ref(str(number))


def test_arguments_keep_their_places_names_and_nesting() -> None:
    def all_of(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return args, kwargs

    dtype = (("dtype", torch.float64), ("of", (ref(0), (1, ref(1)))))
    line = ProgramCall(
        LocalCall(all_of, ((ref(1), (2, ref(0))), (3, 4), None, -1, 0.5, "a"), dtype), (2, 3), False
    )
    a, b = torch.zeros(1), torch.ones(1)
    args, kwargs = emit(Program(2, (line,), (2, 3)))([a, b])
    assert args == ((b, (2, a)), (3, 4), None, -1, 0.5, "a")
    assert kwargs == {"dtype": torch.float64, "of": (a, (1, b))}


def test_a_value_is_free_behind_its_last_read() -> None:
    held: list[Any] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        held.append(weakref.ref(x))
        return x + 1

    def alive(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([ref() is not None for ref in held])

    lines = (
        ProgramCall(LocalCall(look, (ref(0),)), (1,), True),
        ProgramCall(LocalCall(look, (ref(1),)), (2,), True),
        ProgramCall(LocalCall(alive, (ref(2),)), (3,), True),
    )
    values = [torch.zeros(2)]
    (seen,) = emit(Program(1, lines, (3,)))(values)
    assert not values
    assert seen.tolist() == [False, False]


def test_of_what_a_line_makes_only_what_is_read_is_kept() -> None:
    lines = (
        ProgramCall(LocalCall(aten.topk.default, (ref(0), 2)), (None, 1), False),
        ProgramCall(LocalCall(aten.mul.Tensor, (ref(1), 2)), (2,), True, into=1),
    )
    (found,) = emit(Program(1, lines, (2,)))([torch.tensor([1.0, 5.0, 3.0])])
    assert found.tolist() == [2, 4]


def test_a_program_without_lines_returns_what_it_reads() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    assert emit(Program(2, (), (1, 0)))([a, b]) == (b, a)
