import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrun.engine.errors import SbpError
from flowrun.engine.ir.signature import LocalCall, LocalView, OpView, rebind
from flowrun.testing import RowError, prove


@torch.library.custom_op("prove::counted", mutates_args=())
def counted(x: torch.Tensor, ids: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Sum over samples that count."""
    return (x * (ids != ignore_index)[:, None]).sum(0)


@torch.library.custom_op("prove::averaged", mutates_args=())
def averaged(x: torch.Tensor, size: int) -> torch.Tensor:
    """The sum of the rows over a size."""
    return x.sum(0) / size


@torch.library.custom_op("prove::scale_", mutates_args=("x",))
def scale_(x: torch.Tensor) -> None:
    x.mul_(2)


X = torch.randn(7, 6, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([0, 1, -100, 2, -100, 3, 1])
RIGHT = ["S0, S0 -> P", "S1, B -> S0", "P, B -> P"]


@pytest.mark.parametrize("op", ["prove::counted", counted, torch.ops.prove.counted.default])
@pytest.mark.parametrize(
    "sample", [(X, IDS), {"x": X, "ids": IDS, "ignore_index": 1}], ids=["in order", "by name"]
)
def test_rows_that_hold_are_proved(op: Any, sample: Any) -> None:
    prove(op, RIGHT, [sample])
    prove(op, lambda view: RIGHT[:1] if view.parts > 1 else [], [sample])


@pytest.mark.parametrize("seed", [0, 20, 331, 358])  # some of which bf16 rounds far
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_rows_are_proved_in_any_dtype(dtype: torch.dtype, seed: int) -> None:
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(seed))
    prove(counted, RIGHT, [(x.to(dtype), IDS)])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            ["S0, S0 -> P", "S0, S0 -> B"],
            r"counted\.default\(7x6; 7\) on 2 ranks: S\(0\), S\(0\) -> B",
        ),
        (["S0, S0 -> S0"], r"output y0 is not S\(0\): pieces \(6,\), \(6,\)"),
        (["S0, B -> P"], r"RuntimeError: The size of tensor"),
        (["P, P -> P"], "shape \\(6,\\), differs by up to"),
        (["B, B -> P"], "shape \\(6,\\), differs by up to"),
    ],
    ids=["a sum", "a piece", "unlike pieces", "both", "copies"],
)
def test_a_wrong_row_is_shown_with_its_sample(rows: list[str], said: str) -> None:
    with pytest.raises(RowError, match=said):
        prove("prove::counted", rows, [(X, IDS)])


def test_a_row_is_tried_where_its_dims_are_long_enough() -> None:
    prove(counted, RIGHT, [(X[:1], IDS[:1]), (X, IDS)])
    with pytest.raises(RowError, match=r"no sample tries S\(0\), S\(0\) -> P"):
        prove(counted, RIGHT, [(X[:1], IDS[:1])])


def test_sizes_that_do_not_divide_are_told_apart() -> None:
    """Half of the samples each: right on 2 and on 4 ranks, wrong where pieces are unlike."""

    def local(view: LocalView) -> LocalCall:
        whole = view.in_shapes[0][0]
        return rebind(view.op, size=whole)

    prove(averaged, ["S0 -> P"], [(X, 7)], local=local)
    with pytest.raises(RowError, match="differs by up to"):
        prove(averaged, ["S0 -> P"], [(X, 7)], local=lambda view: rebind(view.op, size=8))


def test_what_cannot_be_proved_is_refused() -> None:
    with pytest.raises(SbpError, match="reads 2 tensors"):
        prove(counted, ["S0 -> S0"], [(X, IDS)])
    with pytest.raises(ValueError, match=r"prove\.scale_\.default writes into its arguments"):
        prove("prove::scale_", ["S0 -> "], [(X,)])
    with pytest.raises(ValueError, match="needs at least one sample"):
        prove(counted, RIGHT, [])
    with pytest.raises(ValueError, match="no op 'prove::other'"):
        prove("prove::other", RIGHT, [(X, IDS)])


def test_the_rule_sees_op_and_shapes() -> None:
    seen: list[OpView] = []
    prove(counted, lambda view: seen.append(view) or [], [(X, IDS)])  # type: ignore[func-returns-value]
    assert {(view.in_shapes, view.out_shapes) for view in seen} == {(((7, 6), (7,)), ((6,),))}


def test_the_example_of_the_page_runs_and_its_wrong_row_is_told() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "how_to" / "signatures.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, "docs/how_to/signatures.md", "exec", dont_inherit=True), names)
    with pytest.raises(RowError, match=r"S\(0\), S\(0\) -> B does not hold"):
        prove("my::row_sums", ["S0, S0 -> B"], [(X, IDS, 2)])
