"""module_checks: what is known of a module before it is captured, and would train otherwise.

Each is a mistake, or a thing that capture cannot see: an error at the recipe's key, with the names
of the parameters or modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowrun.engine.capture.side_effects import module_name
from flowrun.engine.errors import RecipeError
from flowrun.engine.user_code import is_users


def check_modules(modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Raises RecipeError.

    modules: prefix of names -> a module that is trained.  tensors: name -> parameter or buffer.
    """
    for name, tensor in tensors.items():
        if nn.parameter.is_lazy(tensor):
            raise RecipeError(
                "model",
                f"{name} has no shape yet: it is made by the first call of a lazy module.",
                "Name its sizes (nn.Linear for nn.LazyLinear), or call the module once on an"
                " example at the end of its __init__.",
            )
        hooks = getattr(tensor, "_post_accumulate_grad_hooks", None)
        if hooks and tensor.requires_grad:
            raise RecipeError(
                "model",
                f"{name} has a hook of register_post_accumulate_grad_hook{_of(hooks)}, which plain"
                " torch calls between backward and the update.",
                "Use register_hook, whose function makes a new gradient of the gradient, or"
                " optim.clip_value, optim.groups.",
            )
    for path, module in _named_modules(modules):
        if module._backward_hooks or module._backward_pre_hooks:
            hooks = module._backward_hooks or module._backward_pre_hooks
            raise RecipeError(
                "model",
                f"{module_name(path)} has a hook on its backward{_of(hooks)}, which capture cannot"
                " follow.",
                "Write x.register_hook(…) on a tensor inside forward, or register_hook on a"
                " parameter.",
            )
    if pair := _overlapping(tensors):
        raise RecipeError("model", *_why_shared(*pair, tensors))


def _named_modules(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in modules.items():
        for path, each in module.named_modules():
            yield f"{prefix}{path}".rstrip("."), each


def _of(hooks: Mapping[Any, Any]) -> str:
    """Where the first of some hooks is written."""
    place = place_of_function(next(iter(hooks.values())))
    return f" ({place})" if place else ""


def place_of_function(function: Any) -> str:
    """ "mod.py:41", where a user's function begins; "" if it does not tell."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None or not is_users(code.co_filename):
        return ""
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"


# ---- memory that two tensors share ---------------------------------------------------------------


def _why_shared(one: str, other: str, tensors: Mapping[str, Tensor]) -> tuple[str, str]:
    kinds = [
        "parameter" if isinstance(tensors[n], nn.Parameter) else "buffer" for n in (one, other)
    ]
    problem = (
        f"{kinds[0]} {one} and {kinds[1]} {other} share memory under two objects: in plain torch an"
        " update of one changes the other."
    )
    if kinds == ["parameter"] * 2 and tensors[one].shape == tensors[other].shape:
        return problem, f"Tie them as one parameter: {other} = {one}, without .data."
    return problem, "Compute one from the other in forward, or copy it (.clone()) to part them."


def _overlapping(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Two names of which one is a trained parameter, with an element of memory in common."""
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    for names in by_storage.values():
        for one, other in itertools.combinations(names, 2):
            pair = tensors[one], tensors[other]
            if any(t.requires_grad for t in pair) and overlap(*pair):
                return one, other
    return None


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common; of two dtypes, whether their
    spans have.
    """
    (a, b), (c, d) = _span(one), _span(other)
    if b <= c or d <= a:
        return False
    if one.dtype != other.dtype or one.numel() == 0 or other.numel() == 0:
        return bool(one.numel() and other.numel())
    marks = torch.zeros(max(b, d) // one.element_size(), dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte and end of a tensor in its storage."""
    size = tensor.element_size()
    first = int(tensor.storage_offset())
    last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (last + 1) * size
