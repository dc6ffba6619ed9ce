"""Every signature table, judged exhaustively on simulated ranks: what is listed holds, and what
holds is listed or has a reason.  Families that have not changed since they were proved are tried
under --thorough alone (support/samples/proved_rows.py).

All SBPs of all inputs and outputs are tried on 2 and on 3 ranks, with uneven pieces and partial
pieces of mixed signs.
"""

from collections.abc import Iterator, Sequence

import pytest
import torch

from flowrun.engine.ir.graph import Op, Ref
from flowrun.engine.ir.sbp import B, P, Partial, S, Sbp
from flowrun.engine.ir.signature import NdSignature, OpView, Signature, rows
from flowrun.engine.ops import registry
from flowrun.engine.ops.proof.simulated_ranks import OpSample, lay_out, sample
from support.samples import proved_rows
from support.samples.absent_rows import ABSENT, Absent, reason_for_absence
from support.samples.proved_rows import changed_families, family_of, is_recorded, samples
from support.samples.sample_values import T
from support.samples.table_verdict import missing_rows, nd_rows, row_holds, wrong_rows

SAMPLES = samples()
CHANGED = changed_families()


def proofs(given: Sequence[OpSample]) -> pytest.MarkDecorator:
    """Parametrize by samples; those of families that are proved as they stand are thorough."""
    return pytest.mark.parametrize(
        "given", [pytest.param(s, id=s.label, marks=marks(s.op.target)) for s in given]
    )


def marks(*targets: str) -> tuple[pytest.MarkDecorator, ...]:
    changed = any(family_of(target) in CHANGED for target in targets)
    return () if changed else (pytest.mark.thorough,)


BY_SAMPLE = proofs(SAMPLES)
BY_PARTS = pytest.mark.parametrize("parts", [2, 3])

# Kernels of CUDA: the same mathematics as the CPU's, but not proved on a machine without it.
UNPROVED = {"aten._fused_rms_norm_backward.default"}
WHOLE = {"flow.check", "flow.after", "flow.put_under_mask"}  # no rank has a part of them


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- the proof -----------------------------------------------------------------------------------


def listed(given: OpSample, parts: int) -> tuple[Signature, ...]:
    return registry.signatures(given.op, given.in_shapes, given.out_shapes, parts)


@BY_PARTS
@BY_SAMPLE
def test_every_row_that_is_listed_holds(given: OpSample, parts: int) -> None:
    assert [str(row) for row in wrong_rows(given, listed(given, parts), parts)] == []


@BY_PARTS
@BY_SAMPLE
def test_every_row_that_holds_is_listed_or_has_a_reason(given: OpSample, parts: int) -> None:
    missing = missing_rows(given, listed(given, parts), parts)
    assert [str(row) for row in missing if reason_for_absence(given, row) is None] == []


def test_every_table_has_a_sample() -> None:
    tables = set(filter(registry.has_table, registry.OPS))
    assert tables - {s.op.target for s in SAMPLES} == UNPROVED | WHOLE


def test_a_sample_before_its_table_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    given = sample("aten.copysign.Tensor", T(5, 4), T(5, 4))
    monkeypatch.setattr(proved_rows, "samples", lambda: (given,))
    assert "" in proved_rows.digests.__wrapped__() and family_of(given.op.target) == ""


def test_every_local_program_belongs_to_a_table() -> None:
    local = {target: info for target, info in registry.OPS.items() if info.local}
    assert [t for t, info in local.items() if not (info.rule or info.relabels)] == []


@pytest.mark.parametrize(
    "absent", [pytest.param(a, id=a.targets, marks=marks(*a.among(registry.OPS))) for a in ABSENT]
)
def test_every_reason_is_needed(absent: Absent) -> None:
    """A reason that no row needs any more is struck out."""
    concerned = [given for given in SAMPLES if absent.among([given.op.target])]
    rows = (
        (given.op, row) for given in concerned for row in missing_rows(given, listed(given, 2), 2)
    )
    assert any(absent.covers(op, row) for op, row in rows)


def test_every_family_is_proved_as_it_stands() -> None:
    assert set() == CHANGED or not is_recorded(), (
        "the rows of these families are proved in this run; if they hold, write that down:"
        " python tests/support/samples/proved_rows.py --write"
    )


# ---- the judge is judged -------------------------------------------------------------------------

CLASSES = torch.tensor([0, 5, 2, -100, 3])


@pytest.mark.parametrize(
    ("given", "planted"),
    [
        (sample("aten.relu.default", T(5, 4)), "P -> P"),
        (sample("aten.add.Tensor", T(5, 4), T(5, 4)), "P,B -> P"),
        (sample("aten.mul.Tensor", T(5, 4), T(5, 4)), "P,P -> P"),
        (sample("aten.native_layer_norm.default", T(5, 4), (4,), None, None, 1e-5), "S1 -> S1,B,B"),
        (sample("aten.linalg_vector_norm.default", T(5, 4)), "S0 -> P"),
        (sample("aten._to_copy.default", T(5, 4), dtype=torch.int64), "P -> P"),
        (sample("aten.addmm.default", T(3), T(5, 4), T(4, 3)), "B,S1,S0 -> P"),
        (sample("aten.view.default", T(6, 4), (24,)), "S1 -> S0"),
        (sample("aten.view.default", T(5, 4), (20,)), "S0 -> S0"),
        (sample("aten.nll_loss_forward.default", T(5, 6), CLASSES, None, 1, -100), "S0,S0 -> P,P"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.op.target,
)
def test_a_planted_wrong_row_is_refused(given: OpSample, planted: str) -> None:
    assert wrong_rows(given, rows(planted), 2) == list(rows(planted))


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        (sample("aten.mm.default", T(5, 4), T(4, 3)), "S1,S0 -> P"),
        (sample("aten.relu.default", T(5, 4)), "S1 -> S1"),
        (sample("aten.embedding.default", T(7, 4), torch.tensor([3, 0, 6, 2, 5])), "S0,B -> P"),
        (sample("aten.amax.default", T(5, 4), (1,)), "S1 -> P(max)"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.op.target,
)
def test_a_row_that_is_left_out_is_found(given: OpSample, left_out: str) -> None:
    (row,) = rows(left_out)
    kept = [other for other in listed(given, 2) if other != row]
    assert missing_rows(given, kept, 2) == [row]


@BY_PARTS
def test_partial_pieces_are_unlike_and_of_mixed_signs(parts: int) -> None:
    whole = T(5, 4)
    pieces = list(lay_out(whole, (P,), (parts,)).values())
    torch.testing.assert_close(sum(pieces), whole)
    assert all((piece < 0).any() and (piece > 0).any() for piece in pieces)
    assert not torch.allclose(pieces[0], pieces[1])


# ---- rows of the paper ---------------------------------------------------------------------------


def mm(
    m: int = 4, k: int = 4, n: int = 4
) -> tuple[Op, list[tuple[int, ...]], list[tuple[int, ...] | None]]:
    return (
        Op("mm", "aten.mm.default", (Ref("x"), Ref("w")), (), outputs=("y",)),
        [(m, k), (k, n)],
        [(m, n)],
    )


def test_matmul_has_the_rows_of_the_paper() -> None:
    """OneFlow, arXiv 2110.15032, table 1."""
    table = rows("B,B -> B", "S0,B -> S0", "B,S1 -> S1", "S1,S0 -> P", "P,B -> P", "B,P -> P")
    assert set(registry.signatures(*mm(), 2)) == set(table)


@pytest.mark.parametrize(
    ("x", "w", "y"),
    [((S(0), B), (B, S(1)), (S(0), S(1))), ((S(0), S(1)), (B, S(0)), (S(0), P))],
    ids=["column parallel", "row parallel"],
)
def test_matmul_has_the_rows_of_the_paper_on_two_axes(
    x: tuple[Sbp, ...], w: tuple[Sbp, ...], y: tuple[Sbp, ...]
) -> None:
    """OneFlow, arXiv 2110.15032, table 3."""
    assert NdSignature((x, w), (y,)) in nd_rows(*mm(), (2, 2))


def test_one_dim_can_be_split_by_both_axes() -> None:
    lifted = nd_rows(*mm(), (2, 2))
    assert NdSignature(((S(0), S(0)), (B, B)), ((S(0), S(0)),)) in lifted


# ---- grids ---------------------------------------------------------------------------------------

OPS_ON_GRIDS = (
    "mm addmm view expand cat mean embedding embedding_dense_backward arange full squeeze"
    " nll_loss_forward nll_loss_backward _log_softmax _log_softmax_backward_data _softmax"
    " _softmax_backward_data native_layer_norm _native_batch_norm_legit_functional"
    " native_batch_norm_backward mse_loss mse_loss_backward convolution"
)
ON_GRIDS = [s for s in SAMPLES if s.op.target.split(".")[1] in OPS_ON_GRIDS.split()]


@proofs(ON_GRIDS)
def test_lifted_rows_hold_on_a_grid(given: OpSample) -> None:
    grid = (2, 2)
    wrong = [
        str(row)
        for row in nd_rows(given.op, given.in_shapes, given.out_shapes, grid)
        if not _has_empty_piece(given, row, grid) and not row_holds(given, row, grid)
    ]
    assert wrong == []


def _has_empty_piece(given: OpSample, row: NdSignature, grid: tuple[int, ...]) -> bool:
    """True where the larger piece of an uneven split can be split again, but not the smaller:
    boxing refuses that.
    """
    return any(
        not piece.numel()
        for value, nd_sbp in [*zip(given.inputs, row.inputs, strict=True), *_made(given, row)]
        for piece in lay_out(
            value, tuple(B if isinstance(sbp, Partial) else sbp for sbp in nd_sbp), grid
        ).values()
    )


def _made(given: OpSample, row: NdSignature) -> list[tuple[torch.Tensor, tuple[Sbp, ...]]]:
    return [(v, nd) for v, nd in zip(given.made, row.outputs, strict=True) if v is not None]


# ---- the registry --------------------------------------------------------------------------------


def test_a_target_without_a_table_has_only_all_b() -> None:
    op = Op("d", "aten.digamma.default", (Ref("x"),), (), outputs=("y",))
    assert not registry.has_table(op.target)
    assert registry.signatures(op, [(4, 4)], [(4, 4)], 2) == (Signature((B,), (B,)),)


def test_an_axis_of_one_rank_has_only_all_b() -> None:
    assert registry.signatures(*mm(), 1) == (Signature((B, B), (B,)),)


def test_a_dim_shorter_than_the_axis_is_not_split() -> None:
    assert all(S(0) not in row.outputs for row in registry.signatures(*mm(m=2), 3))


def test_all_b_comes_first() -> None:
    firsts = [listed(given, 2)[0] for given in SAMPLES]
    assert all({*row.inputs, *row.outputs} <= {B} for row in firsts)


def test_names_of_tensors_do_not_matter() -> None:
    op, ins, outs = mm()
    other = Op("other", op.target, (Ref("a"), Ref("b")), (), outputs=("c",))
    assert registry.signatures(other, ins, outs, 2) is registry.signatures(op, ins, outs, 2)


def test_a_tensor_read_twice_has_an_sbp_for_each_reading() -> None:
    op = Op("square", "aten.mul.Tensor", (Ref("x"), Ref("x")), (), outputs=("y",))
    assert Signature((P, B), (P,)) in registry.signatures(op, [(4,), (4,)], [(4,)], 2)


def test_rows_that_split_classes_say_how_much_they_reduce() -> None:
    op = Op("s", "aten._log_softmax.default", (Ref("x"), 1, False), (), outputs=("y",))
    reduced = {row.inputs[0]: row.reduced for row in registry.signatures(op, [(6, 8)], [(6, 8)], 2)}
    assert reduced == {B: 0, S(0): 0, S(1): 6}


def test_a_rule_sees_the_shapes_left_over() -> None:
    op = Op("v", "aten.view.default", (Ref("x"), (4, 6)), (), outputs=("y",))
    rule = registry.info(op.target).rule
    assert rule is not None
    assert rule(OpView(op, ((24,),), ((4, 6),), 2)) == rows("P -> P", "S0 -> S0")
    assert rule(OpView(op, ((6,),), ((1, 6),), 2)) == rows("P -> P", "S0 -> S1")
