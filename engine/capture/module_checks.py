"""module_checks: refuse modules that would train differently than in plain torch.

Each check finds a mistake, or something that capture cannot see, before the module is captured, and
raises an error at the recipe's key with the names of the parameters or modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flowrun.engine.capture.side_effects import describe_module
from flowrun.engine.errors import RecipeError, refuse_as
from flowrun.engine.ir.user_code import is_users
from flowrun.engine.torch_internals import accumulation_hooks, module_backward_hooks, storage_id


def check_modules(modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Raise RecipeError for modules of TorchScript or FSDP, lazy parameters, unsupported hooks and
    parameters that share memory.

    modules: prefix of names -> a module that is trained.  tensors: name -> parameter or buffer.
    """
    for root in modules.values():
        refuse_foreign(root)
    for name, tensor in tensors.items():
        if nn.parameter.is_lazy(tensor):
            raise RecipeError(
                "model",
                f"{name} has no shape yet, as the first call of a lazy module creates it.",
                "Name its sizes (nn.Linear for nn.LazyLinear), or call the module once on an"
                " example at the end of its __init__.",
            )
        hooks = accumulation_hooks(tensor)
        if hooks and tensor.requires_grad:
            raise RecipeError(
                "model",
                f"{name} has a hook of register_post_accumulate_grad_hook{_place_of_hook(hooks)},"
                " which plain torch calls between backward and the update.",
                "Use register_hook, whose function returns a changed gradient, or"
                " optim.clip_value, optim.groups.",
            )
    named = ((p + path, m) for p, root in modules.items() for path, m in root.named_modules())
    for path, module in named:
        if hooks := module_backward_hooks(module):
            whose = describe_module(path.rstrip("."))
            raise RecipeError(
                "model",
                f"{whose} has a hook on its backward{_place_of_hook(hooks)}, which cannot be"
                " captured.",
                "Write x.register_hook(…) on a tensor inside forward, or register_hook on a"
                " parameter.",
            )
    if pair := _find_overlap(tensors):
        raise RecipeError("model", *_explain_sharing(*pair, tensors))


def refuse_foreign(root: nn.Module) -> None:
    """Raise RecipeError for a module of TorchScript, which has no Python that could be captured, or
    one that torch has divided over ranks.
    """
    with refuse_as(_refuse_untrained):
        root.train()
    for path, module in root.named_modules():
        whose = describe_module(path)
        if isinstance(module, torch.jit.ScriptModule):
            kind = module.original_name
            raise RecipeError(
                "model",
                f"{whose} is a ScriptModule (torch.jit.script, trace or load) made "
                f"of {kind}, which cannot be captured.",
                f"Name the class itself, {kind}, without torch.jit; load_state_dict takes the "
                "weights of a scripted file.",
            )
        held = {type(each).__name__ for each in (module, *module.parameters(recurse=False))}
        if divides := held & {"FullyShardedDataParallel", "DTensor"}:
            raise RecipeError(
                "model",
                f"{whose} is divided over ranks by torch ({min(divides)}: FSDP, fully_shard or "
                "parallelize_module).",
                "Return the module as it is: placement.axes and zero.stage divide it.",
            )


def _refuse_untrained(error: Exception) -> RecipeError:
    """Return the error for a module that torch.export has made."""
    return RecipeError(
        "model",
        f"the model has no training mode: {type(error).__name__}: {error}",
        "Return the module itself, not what torch.export made of it.",
    )


def _place_of_hook(hooks: Mapping[int, object]) -> str:
    """Return the place of the first of some hooks as part of a message: " (mod.py:41)"."""
    place = place_of_function(next(iter(hooks.values())))
    return f" ({place})" if place else ""


def place_of_function(function: object) -> str:
    """Return where a user's function begins, as "mod.py:41"; "" for other callables."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None or not is_users(code.co_filename):
        return ""
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"


# ---- memory that two tensors share ---------------------------------------------------------------


def _explain_sharing(one: str, other: str, tensors: Mapping[str, Tensor]) -> tuple[str, str]:
    pair = (tensors[one], tensors[other])
    kinds = ["parameter" if isinstance(each, nn.Parameter) else "buffer" for each in pair]
    problem = (
        f"{kinds[0]} {one} and {kinds[1]} {other} share memory but are two objects: in plain torch"
        " an update of one changes the other."
    )
    if kinds == ["parameter"] * 2 and tensors[one].shape == tensors[other].shape:
        return problem, f"Tie them as one parameter: {other} = {one}, without .data."
    return problem, "Compute one from the other in forward, or copy it (.clone())."


def _find_overlap(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return the names of two tensors, one of them trained, that share an element of memory."""
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            by_storage.setdefault(storage_id(tensor), []).append(name)
    for names in by_storage.values():
        for one, other in itertools.combinations(names, 2):
            pair = tensors[one], tensors[other]
            if any(t.requires_grad for t in pair) and overlap(*pair):
                return one, other
    return None


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage share an element.

    Tensors of two dtypes share one if the spans from their first to their last byte overlap.
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
    """Return the first byte of a tensor in its storage, and the byte after its last."""
    size = tensor.element_size()
    first = int(tensor.storage_offset())
    last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first * size, (last + 1) * size
