"""A sample of docs/measured/ops.json, of every kind: each module still trains as it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrun.engine.errors import FlowrunError
from support.nets.survey import CASES, Verdict, verdict

ROWS = Path(__file__).resolve().parents[1] / "docs" / "measured" / "ops.json"
WRITTEN: dict[str, list[str]] = json.loads(ROWS.read_text())
BOUND = 1e-5  # relative, of a loss or a weight: rounding in another order

BY_HAND = (
    "nn.GELU", "nn.GroupNorm", "nn.Conv3d", "nn.AdaptiveAvgPool2d", "nn.TransformerDecoderLayer",
    "torch.argsort", "torch.scatter_add", "nn.MSELoss", "nn.NLLLoss (pixels)",
    "nn.EmbeddingBag (mean)",
)  # fmt: skip
FOUND = (
    "nn.GLU", "nn.PixelUnshuffle", "nn.MaxPool3d", "nn.ReflectionPad1d",
    "F.interpolate (bicubic)", "torch.cummax", "torch.median", "weight_norm", "torch.fft.ifft",
    "torch.complex", "torch.linalg.svd", "nn.SmoothL1Loss", "nn.CosineSimilarity",
)  # fmt: skip
REFUSED = ("nn.RReLU", "nn.Embedding (max_norm)")


def test_the_page_has_every_case_and_none_gathers_its_batch() -> None:
    assert list(WRITTEN) == list(CASES)
    assert {cells[0].split(":")[0] for cells in WRITTEN.values()} == {"by hand", "found", "refused"}
    assert {cells[2] for cells in WRITTEN.values()} <= {"", "-"}
    assert sum(cells[0].startswith("refused") for cells in WRITTEN.values()) <= 5
    assert not [
        name for name, cells in WRITTEN.items() if "failed" in cells[0] or "apart" in cells[3]
    ]


@pytest.mark.parametrize("name", [*BY_HAND, *FOUND])
def test_a_module_trains_as_the_page_says(name: str) -> None:
    found = verdict(name)
    kind, targets = WRITTEN[name][:2]
    by_experiment = tuple(f"aten.{target}" for target in targets.split(", ") if target)
    assert found == Verdict(kind, by_experiment, apart=found.apart)
    assert found.apart <= BOUND


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_page_calls_refused_is(name: str) -> None:
    with pytest.raises(FlowrunError) as error:
        verdict(name)
    said = " ".join(" ".join(str(error.value).split("\n")[1:2]).split())
    assert WRITTEN[name][0] == f"refused: {said}".replace("|", "/")
