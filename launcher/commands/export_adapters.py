"""`flowrun export` of a run that trained adapters: the base with the adapters merged, as a model
without adapters has it, or the adapters alone, as peft has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrun.engine.errors import RecipeError
from flowrun.engine.runtime.drivers import logical_checkpoint as disk
from flowrun.engine.runtime.rank.shards import Shard, make_whole_shard
from flowrun.launcher.model.build import describe_model, instantiate_model
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import RECIPE
from flowrun.launcher.store.tensor_file import Contents, write_whole
from flowrun.models.lora import A, B, Lora, is_conv1d, merge_lora

_PEFT = "peft.get_peft_model"
_PREFIX = "base_model.model."  # of names in peft's file


@dataclass(frozen=True)
class Stored:
    """Weights on the disk.

    step: steps that they were trained for.  contents: shapes and dtypes.  names: of the model's
    state_dict -> name among the contents.  value: reads one of the contents.
    """

    step: int
    contents: Contents
    names: Mapping[str, str]
    value: Callable[[str], Tensor]

    @staticmethod
    def of_file(file: Path) -> Stored:
        """The file that a run ends with."""
        state = load_file(file)  # pages of the file
        contents = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
        return Stored(weights.steps_of(file), contents, {n: n for n in state}, state.__getitem__)

    @staticmethod
    def of_checkpoint(folder: Path, step: int, names: Mapping[str, str]) -> Stored:
        """A checkpoint in a folder, after `step` steps.  names: of its description."""
        contents = disk.read_contents(folder)
        of_model = weights.of_model(names)
        return Stored(step, contents, of_model, lambda name: disk.read_whole(folder, [name])[name])

    @property
    def state(self) -> dict[str, Tensor]:
        """All values by the names of the model's state_dict."""
        return {name: self.value(tensor) for name, tensor in self.names.items()}


def adapted_recipe(run_folder: Path) -> Recipe | None:
    """Return the recipe of a run that trained adapters, its own or peft's; None for another."""
    file = run_folder / RECIPE
    if not file.is_file():
        return None
    keys = yaml.safe_load(file.read_text(encoding="utf-8"))
    adapters, model = keys.get("adapters") or {}, keys.get("model") or {}
    if not adapters.get("modules") and model.get("_target_") != _PEFT:
        return None
    return load([f"recipe={file}"])


def export_adapted(
    recipe: Recipe, stored: Stored, run_folder: Path, to: Path | None, *, alone: bool
) -> Path:
    """Write the merged weights, or the adapters alone; return the file or folder.

    recipe: of the run.  stored: its weights.  run_folder: of the run, which gets the file where
    `to` is None.  Raises RecipeError.
    """
    step = f"step_{stored.step:08d}"
    if alone:
        to = to or run_folder / f"adapters_{step}"
        _write_adapters(recipe, stored, to)
    else:
        to = to or run_folder / f"merged_{step}.safetensors"
        _write_merged(recipe, stored, to)
    return to


def _write_merged(recipe: Recipe, stored: Stored, to: Path) -> None:
    """Write the weights of the model without adapters, one after another."""
    to.parent.mkdir(parents=True, exist_ok=True)
    if not recipe.adapters.modules:
        model: Any = instantiate_model(replace(recipe, weights=""))
        model.load_state_dict(stored.state)
        merged = model.merge_and_unload().state_dict()
        contents = {name: (tuple(value.shape), value.dtype) for name, value in merged.items()}
        stored = Stored(stored.step, contents, {n: n for n in merged}, merged.__getitem__)
        file = weights.file_of(to, contents, stored.names, stored.step)
        write_whole([file], (make_whole_shard(name, stored.value(name)) for name in contents))
        return
    loras = _find_loras(_describe(recipe))
    dropped = {f"{name}.{part}" for name in loras for part in (A, B)}
    names = {name: tensor for name, tensor in stored.names.items() if tensor not in dropped}
    kept = {tensor: stored.contents[tensor] for tensor in names.values()}
    write_whole([weights.file_of(to, kept, names, stored.step)], _merge(stored, kept, loras))


def _merge(stored: Stored, kept: Contents, loras: Mapping[str, Lora]) -> Iterator[Shard]:
    for tensor in kept:
        value = stored.value(tensor)
        module, _, last = tensor.rpartition(".")
        if module in loras and last == "weight":
            a, b = (stored.value(f"{module}.{part}") for part in (A, B))
            value = merge_lora(loras[module], value, a, b)
        yield make_whole_shard(tensor, value.contiguous())


def _write_adapters(recipe: Recipe, stored: Stored, folder: Path) -> None:
    """Write the adapters alone, so that peft's PeftModel.from_pretrained loads them."""
    try:
        import peft
    except ModuleNotFoundError as error:
        raise RecipeError(
            "adapters", "peft writes this format.", "pip install 'flowrun[peft]'"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    model: Any = _describe(recipe)
    config: Any
    if recipe.adapters.modules:
        loras = _find_loras(model)
        _check_base_frozen(model, loras)
        alpha = recipe.adapters.alpha
        config = peft.LoraConfig(
            r=recipe.adapters.rank,
            lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # type: ignore[arg-type]
            lora_dropout=recipe.adapters.dropout,
            target_modules=sorted(loras),
            fan_in_fan_out=any(map(is_conv1d, loras.values())),
        )
        names = [f"{name}.{part}" for name in loras for part in (A, B)]
        found = {_PREFIX + name: stored.value(stored.names[name]) for name in names}
    else:
        config = model.peft_config["default"]
        found = peft.get_peft_model_state_dict(model, state_dict=stored.state)
    config.base_model_name_or_path = recipe.weights or config.base_model_name_or_path
    config.inference_mode = True
    config.save_pretrained(str(folder))
    values = {name: value.contiguous() for name, value in found.items()}
    save_file(values, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _describe(recipe: Recipe) -> nn.Module:
    """Make the model without memory for its weights."""
    return describe_model(replace(recipe, weights=""), draws=False).model


def _find_loras(model: nn.Module) -> dict[str, Lora]:
    modules = model.named_modules(remove_duplicate=False)
    return {name: each for name, each in modules if isinstance(each, Lora)}


def _check_base_frozen(model: nn.Module, loras: Mapping[str, Lora]) -> None:
    ours = {f"{name}.{part}" for name in loras for part in (A, B)}
    held = model.named_parameters(remove_duplicate=False)
    others = [name for name, p in held if p.requires_grad and name not in ours]
    if others:
        raise RecipeError(
            "optim.groups",
            f"parameters of the base were trained, too, which are no adapters: {others[0]}"
            + (f" and {len(others) - 1} more." if others[1:] else "."),
            "Leave out --adapters: the merged weights hold all.",
        )
