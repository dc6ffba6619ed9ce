"""A weighted mixture of data sets.

What holds for N samples, of which the last H are held out (M = N - H are trained on), with weights
w that sum to 1:

1. Item n is a function of n, the sizes of the sources, the weights, N, H and the seed.  So the
   samples of a run are the same in any layout and after a resume, as the sampler's numbers are.
2. Of the items below M, a source has w M of them, rounded up or down; so is it of the other H.
   Every epoch has all M, so the shares hold in each.
3. Of what a source trains on, each sample is an item floor or ceil of (its share / its size) times.
4. No sample is an item both below M and above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from flowrun.engine.errors import ArgumentError
from flowrun.launcher.data.collate import batch_of, collate, item_of
from flowrun.launcher.data.sampler import FieldTypes, field_types_of
from flowrun.launcher.data.stacked import BYTES, DOCUMENTS, Numbers, StackedDataset
from flowrun.launcher.data.steps import sample_seconds

MOST_SAMPLES = 3_000_000_000  # the square is below 2**63
_GOLDEN = (math.sqrt(5) - 1) / 2


class DataMixture(StackedDataset):
    """Samples of several sources, which have the same fields, shapes and dtypes.

    sources: name -> map-style data set.
    weights: name -> share of the samples, any positive numbers; None: the sizes of the sources.
    samples: N, the length of an epoch and what is held out; None: enough for each sample of each
    source to occur.  held_out: the share H / N, which the recipe's eval.fraction is.  seed: of the
    order.
    length, tokenizer: of the sources, which take them by ${data.length} and ${data.tokenizer};
    sources of another length are refused.
    """

    def __init__(
        self,
        sources: Mapping[str, Dataset[dict[str, Tensor]]],
        weights: Mapping[str, float] | None = None,
        samples: int | None = None,
        seed: int = 0,
        held_out: float = 0.0,
        length: int | None = None,
        tokenizer: str | None = None,
    ) -> None:
        self.sources = [*sources.values()]
        _check_alike(sources, length)
        self.vocabulary, self.ids_digest = _one_vocabulary(sources)
        self.tokenizer = tokenizer
        sizes = [len(each) for each in self.sources if isinstance(each, Sized)]
        self.order = MixtureOrder(sizes, _shares(sources, sizes, weights), samples, held_out, seed)
        held = zip(sources, self.sources, strict=True)
        self.notes = (
            f"an epoch of the mixture is {self.order.describe([*sources])}",
            *(f"{name}: {note}" for name, each in held for note in getattr(each, "notes", ())),
        )
        pairs = zip(self.order.shares, self.sources, strict=True)
        self.sample_seconds = sum(share * sample_seconds(each) for share, each in pairs)

    def __len__(self) -> int:
        return self.order.samples

    def stacked(self, indices: Tensor) -> dict[str, Tensor]:
        """Return the items, made by one call of each source."""
        source, index = self.order.find(indices.numpy())
        items: dict[str, Tensor] = {}
        for k in np.unique(source):
            rows = torch.from_numpy(np.flatnonzero(source == k))
            batch = batch_of(self.sources[k], torch.from_numpy(index[source == k]))
            for field, values in batch.items():
                whole = items.setdefault(field, values.new_empty(len(indices), *values.shape[1:]))
                whole[rows] = values
        return items


def find_mixture(data: object, place: str = "data") -> tuple[str, DataMixture] | None:
    """Return (place in a recipe, mixture) of whose samples a data set is made, if it is."""
    if isinstance(data, DataMixture):
        return place, data
    source = getattr(data, "source", None)
    return find_mixture(source, f"{place}.source") if isinstance(source, Dataset) else None


class MixtureOrder:
    """The order finds which sample of which source an item is; nothing is kept for a sample.

    sizes, shares: of the sources; shares sum to 1.  samples: N; None: enough for all to occur.
    held_out: share of N, and of each source, that is held out.
    """

    def __init__(
        self, sizes: list[int], shares: list[float], samples: int | None, held_out: float, seed: int
    ) -> None:
        self.shares, self.seed = shares, seed
        held = [min(size - 1, max(1, int(size * held_out))) if held_out else 0 for size in sizes]
        trained = [size - out for size, out in zip(sizes, held, strict=True)]
        if samples is None:
            samples = self._enough(trained, held_out)
        if samples > MOST_SAMPLES:
            raise ValueError(f"a mixture of {samples:,} samples is over {MOST_SAMPLES:,}")
        self.samples, self.held_out = samples, int(samples * held_out)
        below = _Part(self._counts(samples - self.held_out), trained, [0 for _ in sizes], seed)
        above = _Part(self._counts(self.held_out), held, trained, seed)
        self.parts = (below, above)
        if not min(below.counts):
            raise ValueError(
                f"a source has none of {samples - self.held_out} samples: its weight is too small"
            )
        if any(c and not size for c, size in zip(above.counts, held, strict=True)):
            raise ValueError("a source of one sample cannot hold one out: give it two, or more")

    def describe(self, names: list[str]) -> str:
        """Return for each source how many of its samples an epoch has, and how often each."""
        part = self.parts[0]
        return ", ".join(
            f"{count:,} samples of {name} ({count / size:.3g} times all of it)"
            for name, count, size in zip(names, part.counts, part.sizes, strict=True)
        )

    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return source and index of items (B,): both (B,) int64."""
        limit = self.samples - self.held_out
        source, index = (np.empty(len(numbers), np.int64) for _ in range(2))
        below = numbers < limit
        for part, inside, first in zip(self.parts, (below, ~below), (0, limit), strict=True):
            if inside.any():
                source[inside], index[inside] = part.find(numbers[inside] - first)
        return source, index

    def _counts(self, total: int) -> list[int]:
        """Return how many of a total each source has: the largest remainders are rounded up."""
        exact = [share * total for share in self.shares]
        counts = [math.floor(each) for each in exact]
        order = sorted(range(len(exact)), key=lambda k: counts[k] - exact[k])
        for k in order[: total - sum(counts)]:
            counts[k] += 1
        return counts

    def _enough(self, trained: list[int], held_out: float) -> int:
        """Return N with which all that is trained on occurs."""
        needed = max(size / share for size, share in zip(trained, self.shares, strict=True))
        samples = math.floor(needed / (1 - held_out))
        while any(map(int.__lt__, self._counts(samples - int(samples * held_out)), trained)):
            samples += 1
        return samples


class _Part:
    """Items that take `counts` samples of sources of `sizes`, whose indices begin at `first`."""

    def __init__(self, counts: list[int], sizes: list[int], first: list[int], seed: int) -> None:
        self.counts, self.sizes, self.first, self.seed = counts, sizes, first, seed
        self.ends = np.cumsum(counts)

    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return source and index of items; they count from 0 in this part."""
        place = _spread(numbers, int(self.ends[-1]), self.seed)
        source = np.searchsorted(self.ends, place, side="right")
        index = np.empty_like(place)
        for k in np.unique(source):
            at = place[source == k] - (self.ends[k] - self.counts[k])
            among = _spread(at % self.sizes[k], self.sizes[k], self.seed + int(k) + 1)
            index[source == k] = self.first[k] + among
        return source, index


def _spread(numbers: Numbers, size: int, seed: int) -> Numbers:
    """Return a permutation of range(size) at `numbers`: every stretch of them covers it evenly."""
    step = max(1, round(size * _GOLDEN))
    while math.gcd(step, size) != 1:
        step += 1
    start = int(np.random.default_rng((seed, size)).integers(size))
    spread: Numbers = (numbers * step + start) % size
    return spread


def _shares(
    sources: Mapping[str, object], sizes: list[int], weights: Mapping[str, float] | None
) -> list[float]:
    """Return the weights of sources, or else their sizes, so that they sum to 1."""
    if weights is None:
        weights = dict(zip(sources, map(float, sizes), strict=True))
    if weights.keys() != sources.keys():
        problem = f"weights are of {', '.join(weights)}; sources are {', '.join(sources)}."
        raise ArgumentError("weights", problem)
    for name, weight in weights.items():
        if not 0 < weight < math.inf:
            raise ArgumentError(f"weights.{name}", f"it is {weight}, not a positive number.")
    total = sum(weights.values())
    return [weights[name] / total for name in sources]


def _check_alike(sources: Mapping[str, object], length: int | None) -> None:
    """Raise ValueError where the items of sources are not alike, or not of a length."""
    if not sources:
        raise ArgumentError("sources", "a mixture has sources: {name: {_target_: a data set}}.")
    forms = {name: _form(source) for name, source in sources.items()}
    first, form = next(iter(forms.items()))
    for name, other in forms.items():
        if other != form:
            unlike = {each for each in {*form} & {*other} if form[each] != other[each]}
            more = "; give all one most_documents" if unlike == {DOCUMENTS} else ""
            shown = f"items of {name} are {_show(other)}, those of {first} {_show(form)}"
            raise ValueError(f"{shown}{more}")
    shapes = (shape for field, (shape, _) in form.items() if field != DOCUMENTS)
    if length is not None and any(shape[:1] != (length,) for shape in shapes):
        raise ValueError(f"length is {length}, and items are {_show(form)}")


def _one_vocabulary(sources: Mapping[str, object]) -> tuple[int | None, str | None]:
    """Return the number of ids of sources, and the digest of what they stand for, if one says it.

    Raise ValueError where sources differ in one.
    """
    sizes, digests = (
        {name: value for name, each in sources.items() if (value := getattr(each, key, None))}
        for key in ("vocabulary", "ids_digest")
    )
    if len({*sizes.values()}) > 1:
        raise ValueError(f"sources have unlike numbers of ids, {sizes}: give all one tokenizer")
    if len({*digests.values()}) > 1:
        kinds = ", ".join(
            f"{name}: {value if value == BYTES else f'of a tokenizer, digest {value[:8]}'}"
            for name, value in digests.items()
        )
        raise ValueError(
            f"the same id stands for unlike text in the sources ({kinds}): give all one tokenizer"
        )
    return next(iter(sizes.values()), None), next(iter(digests.values()), None)


def _form(source: object) -> FieldTypes:
    return dict(sorted(field_types_of(collate([item_of(source, 0)], (0,))).items()))


def _show(form: FieldTypes) -> str:
    return ", ".join(
        f"{field} {shape} {str(dtype).removeprefix('torch.')}"
        for field, (shape, dtype) in form.items()
    )
