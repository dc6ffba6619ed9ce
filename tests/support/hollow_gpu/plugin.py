"""Of pytest: tests compute on the hollow GPU."""

from collections.abc import Iterator

import ops
import pytest
import torch

torch.backends.cudnn.enabled = False
torch.backends.cuda.enable_cudnn_sdp(False)
ops.in_other_threads()


@pytest.fixture(autouse=True)
def _computes() -> Iterator[None]:
    with ops.Computed():
        yield
