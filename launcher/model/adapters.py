"""adapters: LoRA around the linears that a recipe names, before the model is captured.

All other parameters of the model are frozen, unless `optim.groups` says frozen: false of them.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable

from torch import nn

from flowrun.engine.errors import RecipeError
from flowrun.engine.torch_internals import parameters_of
from flowrun.launcher.recipe.recipe_errors import did_you_mean
from flowrun.launcher.recipe.schema import Adapters
from flowrun.models import lora
from flowrun.models.lora import AdaptedWeights, LoraTensors

KEY = "adapters.modules"
_PEFT = "base_model.model."  # what peft puts before the names of a model
_PARTS = ("base_layer", "lora_A.default", "lora_B.default")
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def add_adapters(model: nn.Module, asked: Adapters) -> None:
    """Freeze a model, and give the linears that it is asked for adapters.  Raises RecipeError."""
    if not asked.modules:
        return
    found = {name: each for pattern in asked.modules for name, each in _find(model, pattern)}
    _check_untied(model, found)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for linear in dict.fromkeys(found.values()):
        lora.add_lora(linear, asked.rank, asked.alpha, asked.dropout)


def base_names(model: nn.Module) -> dict[str, str]:
    """Return names of the model without adapters, ours or peft's -> names here."""
    if hasattr(model, "peft_config"):
        prefix = getattr(model.base_model, "prefix", "lora_")
        return {
            name.removeprefix(_PEFT).replace(".base_layer.", "."): name
            for name in model.state_dict()
            if not any(part.startswith(prefix) for part in name.split("."))
        }
    ours = {f"{name}.{part}" for name, _ in lora.find_loras(model) for part in (lora.A, lora.B)}
    return {name: name for name in model.state_dict() if name not in ours}


def describe_adapters(model: nn.Module) -> AdaptedWeights | None:
    """Describe the adapters of a model, ours or peft's; None for one without."""
    if hasattr(model, "peft_config"):
        loras, unlike = _of_peft(model)
    else:
        loras, unlike = tuple(lora.tensors_of(*found) for found in lora.find_loras(model)), ""
        if not loras:
            return None
    ours = {name for each in loras for name in (each.a, each.b)}
    held = model.named_parameters(remove_duplicate=False)
    others = tuple(name for name, p in held if p.requires_grad and name not in ours)
    return AdaptedWeights(loras, others, unlike)


def _of_peft(model: nn.Module) -> tuple[tuple[LoraTensors, ...], str]:
    """Return peft's adapters of linears, and the first that is something else."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    found, unlike = [], ""
    for name, each in model.named_modules():
        if isinstance(each, ModulesToSaveWrapper) or (
            isinstance(each, BaseTunerLayer) and not isinstance(each, LoraLayer)
        ):
            unlike = unlike or name
        elif isinstance(each, LoraLayer):
            plain = type(each) is Linear and [*each.lora_A] == ["default"]
            if not plain or each.lora_variant or each.lora_bias["default"]:
                unlike = unlike or name
                continue
            weight, a, b = (f"{name}.{part}.weight" for part in _PARTS)
            transposed = each.fan_in_fan_out  # type: ignore[attr-defined]
            found.append(LoraTensors(weight, a, b, each.scaling["default"], transposed))
    return tuple(found), unlike


def check_read(model: nn.Module, read: Iterable[str]) -> None:
    """Raise RecipeError unless the captured step reads the adapter of every linear that has one."""
    read = set(read)
    for name, _ in lora.find_loras(model):
        if f"{name}.{lora.A}" not in read:
            raise RecipeError(
                KEY,
                f"forward never calls {name}, it reads its weight alone: an adapter does nothing.",
                "Leave it out.",
            )


def _find(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Find the linears that a pattern matches; all that it matches must be linears."""
    modules = dict(model.named_modules(remove_duplicate=False))
    linears = [name for name, each in modules.items() if lora.is_linear(each)]
    matched = _match(pattern, modules)
    others = [name for name in matched if name not in linears]
    if not matched:
        raise RecipeError(KEY, f"{pattern!r} matches no module.", _suggest(pattern, linears))
    if others:
        kind = type(modules[others[0]]).__name__
        what = "an nn.Linear or a Conv1D of transformers whose forward the model calls"
        raise RecipeError(
            KEY,
            f"{pattern!r} matches {others[0]}, a {kind}, which is not {what}.",
            _suggest(
                pattern, _match(pattern, linears) or _match(f"{pattern}.*", linears) or linears
            ),
        )
    return [(name, modules[name]) for name in matched]


def _match(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name and fnmatch.fnmatchcase(name, pattern)]


def _suggest(pattern: str, linears: list[str]) -> str:
    """Suggest patterns that match linears: "*.q_proj" for model.layers.0.self_attn.q_proj."""
    known = list(dict.fromkeys(_pattern(name) for name in linears))
    return did_you_mean(pattern, known) if known else "The model has no linear."


def _pattern(name: str) -> str:
    last = name.rpartition(".")[2]
    return _NUMBER.sub(".*", name) if last.isdigit() else f"*.{last}" if "." in name else name


def _check_untied(model: nn.Module, found: dict[str, nn.Module]) -> None:
    """A tied weight could not be merged: its other owner has no adapter."""
    owners = Counter(
        id(value)
        for module in model.modules()
        for value in parameters_of(module).values()
        if value is not None
    )
    for name, linear in found.items():
        if owners[id(linear.weight)] > 1:
            raise RecipeError(
                KEY,
                f"the weight of {name} is tied to another module's, which would have no adapter.",
                "Leave it out, or untie it.",
            )
