"""Ask torch what an op will do before it runs; lists say what torch does not know (deferred.py).

An op's schema says what it writes to and what it makes; its tags, whether it draws random numbers.
On the meta device it says how its results will lie.  Which ops read nothing, and which functions of
a tensor are no ops, are lists here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor

from flowrun.engine import torch_internals
from flowrun.engine.torch_internals import OpOverload, TreeSpec
from flowrun.launcher.model.replay import Geometry

CPU = torch.device("cpu")

# Each element of the first argument is written, and none is read.
FILLS = frozenset(
    {
        *("bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_"),
        *("log_normal_", "normal_", "random_", "uniform_", "zero_"),
    }
)
EMPTY = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
# They look at values.
LOOKS = frozenset({Tensor.tolist, Tensor.__repr__, Tensor.__format__})
# They hand out memory, or write to it.
ESCAPES = frozenset(
    getattr(Tensor, name)
    for name in (
        *("numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "_typed_storage"),
        *("storage", "__reduce_ex__", "share_memory_", "apply_", "map_", "map2_"),
    )
)


def name_of(op: OpOverload) -> str:
    """Return the name of an op without its overload."""
    return str(op.overloadpacket.__name__)


@cache
def only_views(op: OpOverload) -> bool:
    """True if it makes other views of a storage, and reads no value."""
    if torch.Tag.inplace_view in op.tags:
        return True
    aliases = [x.alias_info for x in torch_internals.schema_of(op).returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


@cache
def draws(op: OpOverload) -> bool:
    """True if it changes a generator."""
    return torch.Tag.nondeterministic_seeded in op.tags


@cache
def makes_tensors(op: OpOverload) -> bool:
    """True if all its results are tensors."""
    kinds = [str(x.type) for x in torch_internals.schema_of(op).returns]
    return bool(kinds) and all("Tensor" in kind for kind in kinds)


@cache
def returns_what_it_writes(op: OpOverload) -> bool:
    """True if it makes no tensor of its own."""
    aliases = [x.alias_info for x in torch_internals.schema_of(op).returns]
    return all(alias is not None and alias.is_write for alias in aliases)


def find_written(op: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> set[int]:
    """Return the ids of the tensors that an op writes to, among its `args` and `kwargs`."""
    given = [
        args[k] if k < len(args) else kwargs.get(argument.name)
        for k, argument in enumerate(torch_internals.schema_of(op).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return {id(x) for x in torch_internals.tree_leaves(given) if isinstance(x, Tensor)}


# what ops raise on the meta device where torch does not know the result
UNKNOWN_RESULT = (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AssertionError)


def run_on_meta(op: OpOverload, leaves: Sequence[object], spec: TreeSpec) -> object:
    """Call an op, with flat arguments, on the meta device; raises one of UNKNOWN_RESULT."""
    args, kwargs = torch_internals.tree_unflatten(list(map(_without_values, leaves)), spec)
    if any(x.name == "device" for x in torch_internals.schema_of(op).arguments):
        kwargs = {**kwargs, "device": torch.device("meta")}
    return op(*args, **kwargs)


def _without_values(x: object) -> object:
    if isinstance(x, torch.Generator):
        return None
    return Geometry.of(x).empty("meta") if isinstance(x, Tensor) else x


def generator(leaves: Sequence[object]) -> torch.Generator:
    """Find the generator of an op that draws, among its flat arguments."""
    given = (x for x in leaves if isinstance(x, torch.Generator))
    return next(given, torch.default_generator)


def ordinary(x: object) -> bool:
    """False if it leads away from ordinary tensors of the CPU."""
    if isinstance(x, Tensor):
        return x.layout is torch.strided and x.device == CPU
    return not isinstance(x, torch.device) or x == CPU


def dense(x: object) -> TypeGuard[Tensor]:
    """True for an ordinary tensor of the CPU, or one of the meta device."""
    return isinstance(x, Tensor) and x.layout is torch.strided and x.device.type in ("cpu", "meta")
