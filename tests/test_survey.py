"""Some of torch's own samples, of every kind, train on two ranks as plain torch trains them.

All of them: `python docs/measured/ops.py`, which writes the page of modules and functions.
"""

import pytest

from flowrun.engine.errors import FlowrunError
from support.nets.survey import BY_HAND, CASES, FOUND, NoCase, verdict

BOUND = 1e-5  # relative, of a loss or a weight: rounding in another order
ROWS = {
    BY_HAND: (
        *("nn.GELU", "nn.GroupNorm", "nn.Conv3d", "nn.AdaptiveAvgPool2d", "nn.Embedding"),
        *("nn.TransformerDecoderLayer", "nn.MSELoss", "nn.NLLLoss", "torch.exp", "torch.where"),
    ),
    FOUND: (
        *("nn.GLU", "nn.AdaptiveMaxPool2d", "nn.MaxPool3d", "nn.ReflectionPad1d"),
        *("nn.SmoothL1Loss", "torch.digamma", "torch.fft.rfft", "torch.linalg.eigh"),
    ),
}


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for kind, names in ROWS.items() for name in names]
)
def test_it_trains_on_two_ranks_as_plain_torch_does(name: str, kind: str) -> None:
    given = verdict(name)
    assert (given.kind, given.whole, given.gathered) == (kind, (), ())
    assert given.apart <= BOUND


def test_a_shape_that_follows_from_values_is_refused() -> None:
    with pytest.raises(FlowrunError, match="torch could not capture"):
        verdict("torch.masked_select")


def test_what_plain_torch_has_no_batch_for_is_no_case() -> None:
    with pytest.raises(NoCase, match="no sample of a batch"):
        verdict("nn.CTCLoss")


def test_the_cases_are_those_of_torchs_own_tests() -> None:
    assert len(CASES) > 600
