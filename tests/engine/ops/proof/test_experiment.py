from typing import Any

import pytest
import torch

from flowrun.engine.ops.proof import experiment as experiment_module
from flowrun.engine.ops.proof.call_form import CallForm, call_forms
from flowrun.engine.ops.proof.experiment import experiment
from flowrun.engine.ops.proof.in_child import experiments
from flowrun.engine.ops.proof.simulated_ranks import sample
from support.plans.parse_form import parse_form

R = torch.randn


def first_form(target: str, *args: Any, reading: int = 0, **kwargs: Any) -> CallForm:
    given = sample(target, *args, **kwargs)
    dtypes = [value.dtype for value in given.inputs]
    return list(call_forms(given.op, given.in_shapes, dtypes, given.out_shapes))[reading]


def found(form: CallForm) -> set[str]:
    return {str(row) for row in experiments([form])[0]}


@pytest.mark.parametrize(
    ("form", "rows"),
    [
        (first_form("aten.digamma.default", R(8, 6)), {"S(0) -> S(0)", "S(1) -> S(1)"}),
        (
            first_form("aten.mm.default", R(8, 6), R(6, 10)),
            {"S(0), B -> S(0)", "B, S(1) -> S(1)", "S(1), S(0) -> P", "P, B -> P", "B, P -> P"},
        ),
        (first_form("aten.glu.default", R(8, 6), 1), {"S(0) -> S(0)"}),
        (first_form("aten.im2col.default", R(4, 3, 8, 8), [3, 3], [1, 1], [0, 0], [1, 1]),
         {"S(0) -> S(0)", "P -> P"}),
        (
            first_form(
                "aten.upsample_nearest2d_backward.default",
                R(4, 3, 16, 16), [16, 16], [4, 3, 8, 8], 2.0, 2.0,
            ),
            {
                "S(0) -> S(0) | local input_size[0]",
                "S(1) -> S(1) | local input_size[1]",
                "P -> P",
            },
        ),
        (
            first_form("aten.smooth_l1_loss.default", R(8, 6), R(8, 6), 1, 1.0),
            {"S(0), S(0) -> P | mean 0", "S(1), S(1) -> P | mean 0"},
        ),
        (
            first_form("aten.smooth_l1_loss_backward.default", R(()), R(8, 6), R(8, 6), 1, 1.0),
            {
                "B, S(0), S(0) -> S(0) | mean 0",
                "B, S(1), S(1) -> S(1) | mean 0",
                "P, B, B -> P",
            },
        ),
        (
            first_form("aten.index_add.default", R(8, 6), 0, torch.tensor([0, 4, 2]), R(3, 6)),
            {"S(1), B, S(1) -> S(1)", "P, B, P -> P"},
        ),
        (first_form("aten.linalg_cholesky_ex.default", torch.eye(5).expand(4, 5, 5)),
         {"S(0) -> S(0), S(0)"}),
        (first_form("aten._fft_r2c.default", R(8, 6), [1], 0, True), {"S(0) -> S(0)", "P -> P"}),
        (
            first_form(
                "aten.native_group_norm.default", R(8, 6, 4), R(6), R(6), 8, 6, 4, 2, 1e-5,
                reading=1,
            ),
            {"S(0), B, B -> S(0), S(0), S(0) | local N", "B, P, P -> P, B, B"},
        ),
        (first_form("aten.renorm.default", R(8, 6), 2, 0, 1.0), {"S(0) -> S(0)"}),
    ],
    ids=lambda value: value.target if isinstance(value, CallForm) else "",
)  # fmt: skip
def test_the_rows_that_hold_are_found(form: CallForm, rows: set[str]) -> None:
    assert found(form) == rows


@pytest.mark.parametrize(
    "form",
    [
        first_form("aten.bernoulli.default", R(8, 6).sigmoid()),
        first_form("aten.nonzero.default", R(8, 6)),
        first_form("aten.arange.default", 7),
        first_form("aten.div.Tensor", R(8, 6), R(8, 6).norm()),
    ],
    ids=lambda form: form.target,
)
def test_what_cannot_be_tried_is_whole(form: CallForm) -> None:
    """Random, of unknown shape, or of nothing; the last holds and shows that the others could."""
    assert bool(found(form)) == (form.target == "aten.div.Tensor")


def test_splits_into_unlike_numbers_are_unlike_forms() -> None:
    three = first_form("aten.unsafe_split.Tensor", R(6, 12), 4, 1)
    four = first_form("aten.unsafe_split.Tensor", R(6, 16), 4, 1)
    assert str(three) != str(four)
    assert parse_form(str(four), dict(four.sizes)) == four


def test_a_kernel_that_ends_its_process_is_refuted_alone() -> None:
    """This one does not look at the shapes that it is given."""
    x = R(6, 2, 4, 6, 6)
    result, indices = torch.ops.aten.max_pool3d_with_indices(x, [2, 2, 2])
    target = "aten.max_pool3d_with_indices_backward.default"
    rest = ([2, 2, 2], [], [0, 0, 0], [1, 1, 1], False, indices)
    assert "S(0), S(0), S(0) -> S(0)" in found(first_form(target, R(result.shape), x, *rest))


def test_a_prover_that_never_cuts_unevenly_finds_no_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """im2col merges channels with positions: even pieces of them would seem to hold."""
    form = first_form("aten.im2col.default", R(4, 6, 8, 8), [3, 3], [1, 1], [0, 0], [1, 1])
    monkeypatch.setattr(experiment_module, "PALETTES", ((4, 6, 8), (8, 4, 6)))
    monkeypatch.setattr(experiment_module, "_parts", lambda candidate, trial: [2])
    assert {str(row) for row in experiment(form) if not isinstance(row, int)} == {"P -> P"}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            first_form("aten.index_add.default", R(8, 6), 0, torch.tensor([0, 4, 2]), R(3, 6)),
            "aten.index_add.default(float[a,b], 0, int64[c], float[c,b])",
        ),
        (
            first_form("aten.sum.dim_IntList", R(4, 1) > 0, [0], True, dtype=torch.float32),
            "aten.sum.dim_IntList(bool[a,1], [0], True, dtype=torch.float32)",
        ),
        (
            first_form("aten.clamp.default", R(()), float("-inf"), None),
            "aten.clamp.default(float[()], -inf, None)",
        ),
    ],
    ids=lambda value: value.target if isinstance(value, CallForm) else "",
)
def test_a_form_is_read_as_it_is_printed(form: CallForm, text: str) -> None:
    assert str(form) == text
    assert parse_form(text, dict(form.sizes)) == form


# ---- ops that would seem to hold on ordinary numbers ---------------------------------------------


def _counted(x: torch.Tensor, ids: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """A mean over what is not ignored."""
    kept = ids != ignore_index
    return (x * kept).sum() / kept.sum().clamp(min=1)


def _padded(ids: torch.Tensor, padding_idx: int) -> torch.Tensor:
    """0, 1, 2 … along all rows where an id is padding; a sum over ranks is right without any."""
    return (ids == padding_idx).to(torch.float64) * torch.arange(ids.shape[0])[:, None]


def _cut(x: torch.Tensor, most: float) -> torch.Tensor:
    return torch.where(x == most, x * x, x)


def _far(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-1e4, 1e4)


def _in_memory(x: torch.Tensor) -> torch.Tensor:
    return x * x.stride(0)


class _Counter:
    calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


def _own_op(name: str, function: Any, schema: str) -> str:
    op = torch.library.custom_op(f"found_rows::{name}", function, mutates_args=(), schema=schema)
    return f"{op._qualname.replace('::', '.')}.default"


IDS = torch.tensor([[0, 1, 2, 3, 1, 0]]).expand(8, 6)
ROWS_BOTH = {"S(0) -> S(0)", "S(1) -> S(1)"}


@pytest.mark.parametrize(
    ("name", "function", "schema", "inputs", "rows"),
    [
        ("counted", _counted, "(Tensor x, Tensor ids, int ignore_index=-100) -> Tensor",
         (R(8, 6), IDS), {"P, B -> P"}),
        ("counted_1", _counted, "(Tensor x, Tensor ids, int ignore_index=-100) -> Tensor",
         (R(8, 6), IDS, 1), {"P, B -> P"}),
        ("counted_255", _counted, "(Tensor x, Tensor ids, int ignore_index=-100) -> Tensor",
         (R(8, 6), IDS.to(torch.uint8), 255), {"P, B -> P"}),
        ("padded", _padded, "(Tensor ids, int padding_idx) -> Tensor",
         (IDS, -1), {"S(1) -> S(1)"}),
        ("cut", _cut, "(Tensor x, float most) -> Tensor", (R(8, 6), 3.5), ROWS_BOTH),
        ("far", _far, "(Tensor x) -> Tensor", (R(8, 6),), ROWS_BOTH),
        ("in_memory", _in_memory, "(Tensor x) -> Tensor", (R(8, 6),), set()),
        ("counter", _Counter(), "(Tensor x) -> Tensor", (R(8, 6),), set()),
        ("along", lambda x: x.cumsum(0), "(Tensor x) -> Tensor", (R(8, 6),),
         {"S(1) -> S(1)", "P -> P"}),
        ("placed", lambda x: x + torch.arange(len(x)).to(x)[:, None], "(Tensor x) -> Tensor",
         (R(8, 6),), {"S(1) -> S(1)"}),
        ("sorted", lambda x: x.argsort(0), "(Tensor x) -> Tensor", (R(8, 6),), {"S(1) -> S(1)"}),
        ("drawn", lambda x: x * torch.rand_like(x), "(Tensor x) -> Tensor", (R(8, 6),), set()),
        ("mean", lambda x: x.mean(0), "(Tensor x) -> Tensor", (R(8, 6),),
         {"S(0) -> P | mean 0", "S(1) -> S(0)", "P -> P"}),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)  # fmt: skip
def test_no_wrong_row_of_a_custom_op_is_found(
    name: str, function: Any, schema: str, inputs: tuple[Any, ...], rows: set[str]
) -> None:
    assert found(first_form(_own_op(name, function, schema), *inputs)) == rows


def test_a_prover_without_the_ops_own_numbers_would_find_a_wrong_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schema = "(Tensor x, Tensor ids, int ignore_index=-100) -> Tensor"
    form = first_form(_own_op("unmarked", _counted, schema), R(8, 6), IDS)
    monkeypatch.setattr(experiment_module, "_marks", lambda form, sizes: [])
    assert "S(0), S(0) -> P | mean 0" in found(form)


def test_what_a_custom_op_writes_into_is_not_tried() -> None:
    def scale(x: torch.Tensor) -> None:
        x.mul_(2)

    op = torch.library.custom_op("found_rows::scale", scale, mutates_args=("x",))
    assert not experiment_module.is_tried(f"{op._qualname.replace('::', '.')}.default")
