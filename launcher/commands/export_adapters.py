"""`flowrun export` of weights with adapters: the base with the adapters merged, as a model without
adapters has it, or the adapters alone, as peft has them.

All is read from the weights, which say what their adapters are; no code of the recipe runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.files import replacing_files
from flowrun.engine.runtime.rank.shards import Shard, make_whole_shard
from flowrun.launcher.commands.load_run import Stored
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.tensor_file import Contents, write_whole
from flowrun.models.lora import A, AdaptedWeights, LoraTensors

_PREFIX = "base_model.model."  # of names in peft's file
_WRAPPED = "base_layer."  # what peft puts before the name of a weight that it adapts
_MADE = "adapter_model.safetensors"


def adapters_among(stored: Stored) -> AdaptedWeights | None:
    """Return the adapters among some weights; None: there are none.

    Raises CommandLineError for weights that do not say how theirs are merged.
    """
    if stored.adapters is None and any(f".{A}" in name for name in stored.names):
        raise CommandLineError(
            "export",
            "the weights hold adapters and do not say how these are merged: an earlier release of "
            "flowrun wrote them.",
            "flowrun resume RUN_DIR train.steps=N writes them again.",
        )
    return stored.adapters


def write_merged(stored: Stored, adapters: AdaptedWeights | None, to: Path) -> None:
    """Write the weights of the model without adapters as one file, one tensor after another.

    adapters: among them; None: there are none.  Raises CommandLineError for adapters that are no
    LoRA.
    """
    names, merged = dict(stored.names), dict[str, LoraTensors]()
    if adapters:
        if adapters.unlike:
            raise CommandLineError(
                "export",
                f"{adapters.unlike} has an adapter that is no LoRA of a linear, which peft merges.",
                "In Python: make the recipe's model, load weights.safetensors by load_state_dict, "
                "and call its merge_and_unload().",
            )
        dropped = {name for each in adapters.loras for name in (each.a, each.b)}
        merged = {names[each.weight]: each for each in adapters.loras}
        names = {_base_name(name): t for name, t in names.items() if name not in dropped}
    kept = {tensor: stored.contents[tensor] for tensor in names.values()}
    to.parent.mkdir(parents=True, exist_ok=True)
    write_whole([weights.file_of(to, kept, names, stored.step)], _merge(stored, kept, merged))


def _base_name(name: str) -> str:
    """Return the name that a tensor has in the model that peft wraps, or its own."""
    return name.removeprefix(_PREFIX).replace(f".{_WRAPPED}", ".")


def _merge(stored: Stored, kept: Contents, merged: Mapping[str, LoraTensors]) -> Iterator[Shard]:
    for tensor in kept:
        value = stored.value(tensor)
        if lora := merged.get(tensor):
            a, b = (stored.value(stored.names[name]) for name in (lora.a, lora.b))
            value = lora.merge(value, a, b)
        yield make_whole_shard(tensor, value.contiguous())


def write_adapters(stored: Stored, adapters: AdaptedWeights, folder: Path, base: str) -> None:
    """Write the adapters alone, so that peft's PeftModel.from_pretrained loads them.

    base: where the base's weights came from; empty: nothing says it.  Raises RecipeError.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        raise RecipeError(
            "adapters", "peft writes this format.", "pip install 'flowrun[peft]'"
        ) from error
    _check_base_frozen(adapters)
    scales = {(each.scale, stored.contents[stored.names[each.a]][0][0]) for each in adapters.loras}
    if adapters.unlike or len(scales) != 1:
        raise CommandLineError(
            "--adapters",
            "peft's file is written of LoRA adapters of one rank and scale; these are others.",
            "Leave it out: the merged weights hold all.",
        )
    [(scale, rank)] = scales
    alpha = scale * rank
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # type: ignore[arg-type]
        target_modules=sorted(map(_module_of, adapters.loras)),
        fan_in_fan_out=any(each.transposed for each in adapters.loras),
    )
    config.base_model_name_or_path = base or None
    config.inference_mode = True
    values = {
        f"{_PREFIX}{_module_of(each)}.lora_{part}.weight": stored.value(
            stored.names[name]
        ).contiguous()
        for each in adapters.loras
        for part, name in (("A", each.a), ("B", each.b))
    }
    with replacing_files(folder) as made:
        config.save_pretrained(str(made))
        save_file(values, made / _MADE, metadata={"format": "pt"})


def _module_of(lora: LoraTensors) -> str:
    """Return the name of the linear in the model without adapters."""
    return _base_name(lora.weight).rpartition(".")[0]


def _check_base_frozen(adapters: AdaptedWeights) -> None:
    if others := adapters.others:
        raise RecipeError(
            "optim.groups",
            f"parameters of the base were trained, too, which are no adapters: {others[0]}"
            + (f" and {len(others) - 1} more." if others[1:] else "."),
            "Leave out --adapters: the merged weights hold all.",
        )
