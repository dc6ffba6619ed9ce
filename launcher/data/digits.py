"""scikit-learn's handwritten digits: real images inside a wheel."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from flowrun.launcher.data.stacked import Rows

_ORDER = 1797  # seed of the fixed order, so that the held-out ones are a fair sample


class Digits(Rows):
    """Handwritten digits: {images (64,) float32 in 0..1, labels () int64}, 1797 samples in one
    fixed shuffled order.
    """

    def __init__(self) -> None:
        rows = np.loadtxt(find_sklearn_data() / "data" / "digits.csv.gz", delimiter=",")
        pixels, labels = rows[:, :-1], rows[:, -1]
        order = np.random.default_rng(_ORDER).permutation(len(labels))
        super().__init__(
            images=torch.from_numpy((pixels[order] / 16).astype(np.float32)),
            labels=torch.from_numpy(labels[order].astype(np.int64)),
        )


def find_sklearn_data() -> Path:
    """Return the folder of scikit-learn's data sets.

    The package itself is not imported: that takes a second and a half.  Raise ModuleNotFoundError
    where there is none.
    """
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'sklearn': pip install 'flowrun[digits]'")
    return Path(package.submodule_search_locations[0]) / "datasets"
