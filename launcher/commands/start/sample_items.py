"""Read some items of a data set for flowrun init: its fields, and names for values without any."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count

import numpy as np
from torch import Tensor

from flowrun.launcher.commands.start.inspect_model import TARGETS, of_word
from flowrun.launcher.data.collate import collate, item_of
from flowrun.launcher.data.named import NamedFields, as_tensor, values_of
from flowrun.launcher.model.dataset_checks import check_items, check_kind, data_errors
from flowrun.launcher.model.targets import make_object
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.recipe.schema import Target
from flowrun.launcher.report.show_plan import show_shape
from flowrun.launcher.terminal import doing

_MOST = 32  # items that are read
_PLAIN = (Tensor, np.ndarray, np.generic, bool, int)  # what is stacked as it is
ValueNames = Sequence[str | None] | Mapping[str, str]
_INSTEAD = "Return numbers in its place: a class as its index, text as ids, [*text.encode()]."


@dataclass(frozen=True, kw_only=True)
class SampleItems:
    """Some items of a data set.

    fields: of the items, stacked (N, …).  number: of all items.  names: for NamedFields; none where
    items have fields of their own.  left_out: of values that make no tensor, what to do.
    """

    fields: Mapping[str, Tensor]
    number: int
    names: ValueNames = ()
    left_out: Sequence[CommandLineError] = ()

    @property
    def comment(self) -> str:
        """Describe an item: "# 50 items: x float32 3 x 32 x 32, y int64 scalar"."""
        dtypes = {name: str(x.dtype).removeprefix("torch.") for name, x in self.fields.items()}
        each = (f"{k} {dtypes[k]} {show_shape(x.shape[1:])}" for k, x in self.fields.items())
        return f"# {self.number:,} items: {', '.join(each)}"


def read_items(word: str, target: Target, arguments: Mapping[str, bool]) -> SampleItems:
    """Read some items of the data set that a target makes.  Raises RecipeError.

    word: its name on the command line.  arguments: of forward, which name the values of a tuple;
    what is left of it is the target.
    """
    doing.doing(f"reading items of {word}")
    with of_word(word):
        data = make_object(target, "data")
        check_kind(data)
        with data_errors():
            values = dict(values_of(item := item_of(data, 0)))
        tensors = {path: as_tensor(value) for path, value in values.items()}
        kept = {path: tensor for path, tensor in tensors.items() if tensor is not None}
        left_out = [_explain(word, p, value) for p, value in values.items() if p not in kept]
        if not kept:
            raise left_out[0]
        names: ValueNames = ()
        if not isinstance(item, Mapping) or not all(map(_is_plain, item.values())):
            name_of = _name_values(kept, arguments)
            names = [name_of.get(path) for path in values]
            if all(path.partition(".")[0].isidentifier() for path in values):
                names = {name_of[path]: path for path in kept}
            data = NamedFields(data, names)
        check_items(data)
        chosen = random.Random(0).sample(range(len(data)), min(_MOST, len(data)))
        numbers = sorted({0, 1, *chosen})
        with data_errors():
            fields = collate([item_of(data, k) for k in numbers], numbers)
    return SampleItems(fields=fields, number=len(data), names=names, left_out=left_out)


def _is_plain(value: object) -> bool:
    is_double = str(getattr(value, "dtype", "")).endswith("float64")
    return isinstance(value, _PLAIN) and not is_double and as_tensor(value) is not None


def _explain(word: str, path: str, value: object) -> CommandLineError:
    what = "None" if value is None else f"a {type(value).__name__}"
    which = f"the value {path!r} of item 0" if path else "item 0"
    return CommandLineError(word, f"{which} is {what}: no tensor can be made of it.", _INSTEAD)


def _name_values(paths: Collection[str], arguments: Mapping[str, bool]) -> dict[str, str]:
    """Return path -> name of values: their own, else arguments of forward, then targets."""
    last = Counter(path.rpartition(".")[2] for path in paths)
    own = {path: path.rpartition(".")[2] for path in paths}
    own = {p: p.replace(".", "_") if last[name] > 1 else name for p, name in own.items()}
    free = [name for name, must in arguments.items() if must and name not in own.values()]
    target = next((a for a in arguments if a in TARGETS and a not in free), "targets")
    names = chain(free, [target], (f"{target}_{k}" for k in count(2)))
    return {path: name if name.isidentifier() else next(names) for path, name in own.items()}
