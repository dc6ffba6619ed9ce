"""What is relied on of torch's Inductor: compile_fx_inner on a functional ATen graph.

Its code takes a list and empties it, writes what was changed in place back into the inputs, makes
new memory for the rest, strided as traced, and allocates by a global of its module.
"""

import fcntl
from pathlib import Path

import pytest
import torch

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import Ref
from flowrun.engine.ir.signature import LocalCall
from flowrun.engine.ops.flow.random import dropout_mask
from flowrun.engine.runtime.inductor import built
from flowrun.engine.runtime.inductor.inductor import (
    Boxed,
    Code,
    Spec,
    build_program,
    infer_specs,
    require_compiler,
    settings_of,
)
from flowrun.engine.runtime.kernels.live_bytes import LiveBytes
from flowrun.engine.runtime.kernels.program import Program, ProgramCall
from support.layouts.grids import Layout, compiled
from support.layouts.plain_loop import TINY_MLP

A, B, X, Y = map(Ref, "0124")
SETTINGS = settings_of(threads=1)
SHAPE = (48, 33)
SPECS = (
    Spec.row_major(SHAPE, torch.float32),
    Spec((33, 48), (1, 33), torch.float32),
    Spec.row_major((), torch.float32),
)


def decayed(average: torch.Tensor, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In place, as optimizers are."""
    return average.lerp_(value.t(), weight)


aten = torch.ops.aten
PROGRAM = Program(
    3,
    (
        ProgramCall(LocalCall(decayed, (A, B, X)), (None,), True, (0,)),
        ProgramCall(LocalCall(aten.t.default, (A,)), (3,), True),
        ProgramCall(LocalCall(aten.add.Tensor, (Ref("3"), B)), (4,), True),
        ProgramCall(LocalCall(aten.tanh.default, (Y,)), (5,), True),
        ProgramCall(LocalCall(aten.sum.default, (Ref("5"),)), (6,), True),
    ),
    (4, 6),
)


@pytest.fixture(scope="module")
def code() -> Code:
    return build_program(PROGRAM, SPECS, "cpu", SETTINGS)


def test_random_numbers_are_the_same_bits() -> None:
    """The hash multiplies 32-bit words and drops what runs over: C++ leaves that open."""
    draw = Ref("0")
    arguments = (draw, 7, "stream", (9, 37), 0.3)
    program = Program(1, (ProgramCall(LocalCall(dropout_mask, arguments), (1,), True),), (1,))
    code = build_program(program, (Spec.row_major((), torch.int64),), "cpu", SETTINGS)
    for step in (0, 5, 10**9):
        (found,) = code([torch.tensor(step)])
        expected = dropout_mask(torch.tensor(step), *arguments[1:])
        assert torch.equal(found, expected)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_products_of_onednn_are_called_as_they_are() -> None:
    linear = torch.ops.mkldnn._linear_pointwise.default
    lines = (
        ProgramCall(LocalCall(aten.tanh.default, (Ref("0"),)), (2,), True),
        ProgramCall(LocalCall(aten.t.default, (Ref("1"),)), (3,), True),
        ProgramCall(LocalCall(linear, (Ref("2"), Ref("3"), None, "none", (), None)), (4,), True),
        ProgramCall(LocalCall(aten.tanh.default, (Ref("4"),)), (5,), True),
    )
    x, weight = torch.randn(8, 5), torch.randn(5, 3)
    code = build_program(Program(2, lines, (5,)), (Spec.of(x), Spec.of(weight)), "cpu", SETTINGS)
    torch.testing.assert_close(code([x, weight])[0], (x.tanh() @ weight).tanh())


def values() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    average, value = (torch.randn(SHAPE, generator=draw) for _ in range(2))
    return [average, value.t(), torch.tensor(0.25)]


def test_code_does_what_the_program_does(code: Code) -> None:
    average, value, weight = values()
    expected = average.lerp(value.t(), weight)
    given = [average, value, weight]
    total, tanh = code(given)
    assert not given, "the list is emptied, so that code frees its inputs as it goes"
    torch.testing.assert_close(average, expected)
    torch.testing.assert_close(total, expected.t() + value)
    torch.testing.assert_close(tanh, total.tanh().sum())


def test_outputs_lie_as_foreseen_in_memory_of_their_own(code: Code) -> None:
    given = values()
    known = {x.untyped_storage().data_ptr() for x in given}
    made = code(given)
    assert tuple(map(Spec.of, made)) == infer_specs(PROGRAM, SPECS, "cpu")
    assert code.strides == tuple(x.stride() for x in made)
    assert not known & {x.untyped_storage().data_ptr() for x in made}


def test_live_bytes_see_what_code_allocates(code: Code) -> None:
    given = values()
    with LiveBytes(given) as seen:
        before = seen.count.live
        made = code(given)
    assert seen.peak - before >= sum(x.nbytes for x in made)


def test_a_host_without_compiler_is_told_what_to_write() -> None:
    none_here = torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")})
    with (
        none_here,
        pytest.raises(RecipeError, match=r"(?s)engine\.compiler.*Install g\+\+.*=eager"),
    ):
        require_compiler()


def test_equal_results_have_memory_of_their_own() -> None:
    """Each may become a sum over micro-batches (engine/actors/sums.py)."""
    lines = (
        ProgramCall(LocalCall(aten.mm.default, (Ref("0"), Ref("1"))), (2,), True),
        ProgramCall(LocalCall(aten.mm.default, (Ref("0"), Ref("1"))), (3,), True),
        ProgramCall(LocalCall(aten.sum.dim_IntList, (Ref("2"), (0,))), (4,), True),
        ProgramCall(LocalCall(aten.sum.dim_IntList, (Ref("2"), (0,))), (5,), True),
    )
    x, y = torch.randn(8, 5), torch.randn(5, 3)
    code = build_program(Program(2, lines, (2, 3, 4, 5)), (Spec.of(x), Spec.of(y)), "cpu", SETTINGS)
    made = code([x, y])
    assert len({one.untyped_storage().data_ptr() for one in made}) == len(made)


def test_one_process_builds_a_piece_while_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built, "cache_folder", lambda: tmp_path)
    with built.one_at_a_time("piece"), (built.marker_folder() / "piece.lock").open("w") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with built.one_at_a_time("another piece"):
            pass
    with built.one_at_a_time("piece"):
        pass


def test_a_rank_builds_a_piece_while_it_holds_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built, "cache_folder", lambda: tmp_path)
    regions = built.BuiltRegions(compiled(TINY_MLP, Layout()).plan, "cpu", 1)
    held = set()

    def build(*_: object) -> Boxed:
        for lock in built.marker_folder().iterdir():
            with lock.open("w") as other, pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held.add(lock.stem)
            lock.unlink()
        return lambda values: ()

    monkeypatch.setattr(built, "build_program", build)
    for part in regions.different.values():
        regions.kernel(part)
    assert held == regions.different.keys() and held
