"""flowrun import: the keys of DeepSpeed's JSON or accelerate's YAML that a recipe has, too.

Each row of a table says which key of ours a foreign key is, and how its value is turned; a key
without a row is named, never dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrun.launcher.recipe.key_trees import flatten_keys
from flowrun.launcher.recipe.recipe_errors import CommandLineError
from flowrun.launcher.recipe.schema import MICRO_BATCH
from flowrun.launcher.terminal.console import say

_DECAY = {"name": "LinearLR", "start_factor": 1.0, "end_factor": 0.0}
AUTO = "auto"  # DeepSpeed's word for what the trainer says
Keys = Mapping[str, Any]
# (value, all foreign keys) -> our dotted keys with their values; empty: the value means the default
Turn = Callable[[Any, Keys], Keys]


class Untranslated(Exception):
    """A value has no equal in a recipe; the text says why."""


def _to(key: str, convert: Callable[[Any], Any] = lambda value: value) -> Turn:
    return lambda value, _: {key: convert(value)}


def _nothing(value: Any, keys: Keys) -> Keys:
    """The key changes no result: flowrun chooses it by itself, or another key says it."""
    return {}


def _dtype(name: str) -> Turn:
    return lambda value, _: {"precision.dtype": name} if value is True else {}


def _zero_stage(value: Any, _: Keys) -> Keys:
    return {"zero.stage": int(value)} if int(value) else {}


def _offload(value: Any, _: Keys) -> Keys:
    device = value.get("device") if isinstance(value, Mapping) else value
    if device in (None, "none", False):
        return {}
    raise Untranslated(f"flowrun keeps nothing on {device}")


# what optimizers of DeepSpeed 0.19 take where a file is silent; a recipe's take other numbers
_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
_SILENT: Mapping[str, Keys] = {
    "adamw": _ADAM,
    "lamb": _ADAM,
    "lion": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
}
_NO_CLIPPING = (
    "the file does not say it: DeepSpeed 0.19 then clips at 1.0, and so does the recipe; older ones"
    " do not clip, which is optim.clip_norm=0"
)


def _optimizer(value: Any, keys: Keys) -> Keys:
    names = {"adam": "adamw", "adamw": "adamw", "lamb": "lamb", "lion": "lion", "sgd": "sgd"}
    name = names.get(str(value).lower())
    if name is None:
        raise Untranslated("flowrun has adamw, sgd, lion, lamb, adagrad and optim.update")
    silent = {k: v for k, v in _SILENT[name].items() if f"optimizer.params.{k}" not in keys}
    return {"optim.name": name, **{f"optim.{key}": silent[key] for key in silent}}


def _schedule(value: Any, keys: Keys) -> Keys:
    if value not in ("WarmupLR", "WarmupDecayLR"):
        raise Untranslated("optim.schedule takes any class of torch.optim.lr_scheduler")
    if keys.get("scheduler.params.warmup_type", "log") != "linear":
        raise Untranslated("its warm-up is logarithmic, and that of optim.warmup_steps linear")
    if value == "WarmupLR":
        return {}
    steps = int(keys["scheduler.params.total_num_steps"])
    left = steps - int(keys.get("scheduler.params.warmup_num_steps", 0))
    return {"optim.schedule": {**_DECAY, "total_iters": left}}


def _micro_batch(value: Any, keys: Keys) -> Keys:
    """The batch of a step is that of all ranks and micro-batches, which their file may not say."""
    if isinstance(keys.get("train_batch_size"), int):
        return {}
    accumulated = keys.get("gradient_accumulation_steps", 1)
    accumulated = accumulated if isinstance(accumulated, int) else 1
    raise Untranslated(f"write train.batch_size = {value} x {accumulated} x the ranks of axis data")


def _accumulation(value: Any, _: Keys) -> Keys:
    """Their loops divide the loss of each micro-batch by their number, which is a mean of means."""
    mean = {"train.loss_mean": MICRO_BATCH} if int(value) > 1 else {}
    return {"train.micro_batches": int(value), **mean}


def _processes(value: Any, _: Keys) -> Keys:
    return {"placement.axes.data": int(value)} if int(value) > 1 else {}


def _mixed_precision(value: Any, _: Keys) -> Keys:
    if value in ("no", None):
        return {}
    if value not in ("bf16", "fp16"):
        raise Untranslated("flowrun computes in fp32, bf16 or fp16")
    return {"precision.dtype": value}


def _sharding(value: Any, _: Keys) -> Keys:
    stages = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0}
    stage = stages.get(str(value))
    if stage is None:
        raise Untranslated("zero.stage shards over one axis; HYBRID_SHARD needs two data axes")
    return {"zero.stage": stage} if stage else {}


def _reshard(value: Any, _: Keys) -> Keys:
    return {"zero.stage": 3 if value else 2}


def _kind(value: Any, _: Keys) -> Keys:
    if str(value) in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED"):
        return {}
    raise Untranslated("flowrun runs on CPUs and CUDA")


def _from_zero(value: Any, _: Keys) -> Keys:
    if value:
        raise Untranslated("optim.warmup_steps begins at 0")
    return {}


def _recompute(value: Any, _: Keys) -> Keys:
    if value:
        raise Untranslated("name the blocks: recompute.modules: [model.layers.*]")
    return {}


def _deepspeed_inside(name: str) -> Turn:
    """A key of accelerate's section deepspeed_config that DeepSpeed's own file has under `name`."""
    return lambda value, keys: DEEPSPEED[name](value, keys)


_NUMBERS = {
    "optimizer.params.lr": _to("optim.lr", float),
    "optimizer.params.betas": _to("optim.betas", list),
    "optimizer.params.eps": _to("optim.eps", float),
    "optimizer.params.weight_decay": _to("optim.weight_decay", float),
    "optimizer.params.momentum": _to("optim.momentum", float),
    "optimizer.params.nesterov": _to("optim.nesterov", bool),
}
DEEPSPEED: Mapping[str, Turn] = {
    "train_batch_size": _to("train.batch_size", int),
    "train_micro_batch_size_per_gpu": _micro_batch,
    "gradient_accumulation_steps": _accumulation,
    "gradient_clipping": _to("optim.clip_norm", float),
    "bf16.enabled": _dtype("bf16"),
    "bfloat16.enabled": _dtype("bf16"),
    "fp16.enabled": _dtype("fp16"),
    "fp16.loss_scale": lambda value, _: {"precision.loss_scale": float(value)} if value else {},
    "zero_optimization.stage": _zero_stage,
    "zero_optimization.offload_optimizer.device": _offload,
    "zero_optimization.offload_param.device": _offload,
    "optimizer.type": _optimizer,
    **_NUMBERS,
    "scheduler.type": _schedule,
    "scheduler.params.warmup_num_steps": _to("optim.warmup_steps", int),
    "scheduler.params.total_num_steps": _to("train.steps", int),
    "scheduler.params.warmup_type": _nothing,
    "scheduler.params.warmup_min_lr": _from_zero,
    "scheduler.params.warmup_max_lr": _to("optim.lr", float),
    **dict.fromkeys(
        (
            "zero_optimization.overlap_comm",
            "zero_optimization.contiguous_gradients",
            "zero_optimization.reduce_bucket_size",
            "zero_optimization.allgather_bucket_size",
            "zero_optimization.reduce_scatter",
            "zero_optimization.allgather_partitions",
            "zero_optimization.stage3_prefetch_bucket_size",
            "zero_optimization.stage3_param_persistence_threshold",
            "zero_optimization.stage3_max_live_parameters",
            "zero_optimization.stage3_max_reuse_distance",
            "zero_optimization.sub_group_size",
            "steps_per_print",
            "wall_clock_breakdown",
        ),
        _nothing,
    ),
}
ACCELERATE: Mapping[str, Turn] = {
    "num_processes": _processes,
    "gradient_accumulation_steps": _accumulation,
    "num_machines": lambda value, _: {"launch.nnodes": int(value)} if int(value) > 1 else {},
    "machine_rank": lambda value, keys: (
        {"launch.node_rank": int(value)} if int(keys.get("num_machines", 1)) > 1 else {}
    ),
    "main_process_ip": lambda value, keys: (
        {"launch.rdzv_endpoint": f"{value}:{keys.get('main_process_port') or 29500}"}
        if value and int(keys.get("num_machines", 1)) > 1
        else {}
    ),
    "main_process_port": _nothing,
    "mixed_precision": _mixed_precision,
    "use_cpu": lambda value, _: {"launch.device": "cpu"} if value else {},
    "distributed_type": _kind,
    "fsdp_config.fsdp_sharding_strategy": _sharding,
    "fsdp_config.fsdp_reshard_after_forward": lambda value, keys: (
        _sharding(value, keys) if isinstance(value, str) else _reshard(value, keys)
    ),
    "fsdp_config.fsdp_activation_checkpointing": _recompute,
    "fsdp_config.fsdp_offload_params": lambda value, keys: _offload("cpu" if value else None, keys),
    "deepspeed_config.zero_stage": _deepspeed_inside("zero_optimization.stage"),
    "deepspeed_config.gradient_accumulation_steps": _accumulation,
    "deepspeed_config.gradient_clipping": _deepspeed_inside("gradient_clipping"),
    "deepspeed_config.offload_optimizer_device": _offload,
    "deepspeed_config.offload_param_device": _offload,
    **dict.fromkeys(
        (
            "compute_environment",
            "main_training_function",
            "rdzv_backend",
            "same_network",
            "debug",
            "downcast_bf16",
            "enable_cpu_affinity",
            "deepspeed_config.zero3_init_flag",
            "fsdp_config.fsdp_version",
            "fsdp_config.fsdp_auto_wrap_policy",
            "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
            "fsdp_config.fsdp_backward_prefetch",
            "fsdp_config.fsdp_forward_prefetch",
            "fsdp_config.fsdp_cpu_ram_efficient_loading",
            "fsdp_config.fsdp_sync_module_states",
            "fsdp_config.fsdp_use_orig_params",
            "fsdp_config.fsdp_state_dict_type",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "tpu_env",
        ),
        _nothing,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What was made of a foreign file.

    keys: ours, dotted, with their values.  others: foreign keys that have no equal -> why.
    """

    kind: str
    keys: Keys
    others: Mapping[str, str]

    def to_yaml(self, name: str) -> str:
        """Return a recipe that lacks a model and data.  name: of the foreign file."""
        tree: dict[str, Any] = {}
        for dotted, value in self.keys.items():
            *sections, key = dotted.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[key] = value
        optim = tree.get("optim", {}).pop("name", "adamw")
        head = [
            f"# What {name} ({self.kind}) says, as flowrun import wrote it.",
            f"defaults: [/model: gpt_tiny, /data: text, /optim: {optim}, /launch: local]  # yours",
        ]
        notes = [f"# not taken: {key}: {why}" for key, why in self.others.items()]
        shown = {key: value for key, value in tree.items() if value}
        body = yaml.safe_dump(shown, sort_keys=False, default_flow_style=None) if shown else ""
        return "\n".join([*head, "", body.rstrip(), *notes]).rstrip() + "\n"


def read_foreign(file: Path) -> Imported:
    """Read DeepSpeed's JSON or accelerate's YAML.  Raises PlacedError for any other file."""
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        said = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        why = " ".join(str(said).split())
        raise CommandLineError(str(file), f"this file cannot be read: {why}.") from None
    flat = dict(flatten_keys(found)) if isinstance(found, Mapping) else {}
    tables = {"DeepSpeed": DEEPSPEED, "accelerate": ACCELERATE}
    kind = max(tables, key=lambda name: len(flat.keys() & tables[name].keys()))
    if not flat.keys() & tables[kind].keys():
        raise CommandLineError(
            str(file),
            "this is neither DeepSpeed's configuration nor accelerate's: no key is known.",
            f"Known are {', '.join([*DEEPSPEED][:3])} …, {', '.join([*ACCELERATE][:3])} …",
        )
    return translate(flat, kind, tables[kind])


def translate(flat: Keys, kind: str, table: Mapping[str, Turn]) -> Imported:
    """Turn foreign keys into ours.

    flat: foreign keys, dotted.  kind: of the file.  table: its rows.
    """
    keys: dict[str, Any] = {}
    others: dict[str, str] = {}
    for key, value in flat.items():
        if value == AUTO:
            others[key] = "auto: their trainer says it, and your recipe does"
        elif key not in table:
            others[key] = "no key of a recipe is known for it"
        else:
            try:
                keys |= table[key](value, flat)
            except Untranslated as why:
                others[key] = str(why)
            except (TypeError, ValueError, KeyError):
                others[key] = f"{value!r} is no value that is known"
    if table is DEEPSPEED and "gradient_clipping" not in flat:
        keys["optim.clip_norm"], others["gradient_clipping"] = 1.0, _NO_CLIPPING
    if "zero.stage" in keys and "placement.axes.data" not in keys:
        keys["placement.axes.data"] = 1
        others["the number of ranks"] = "write it to placement.axes.data"
    return Imported(kind=kind, keys=keys, others=others)


def write_foreign(file: Path, to: Path) -> Imported:
    """Read a foreign file and write a recipe.

    file: theirs.  to: ours, which must not be there.  Raises PlacedError.
    """
    found = read_foreign(file)
    if to.exists():
        raise CommandLineError(str(to), "this file is there already.", "Write --to FILE.")
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(found.to_yaml(file.name), encoding="utf-8")
    return found


def show_import(found: Imported, to: Path, console: Console) -> None:
    """Print what was taken and what was not.

    found: of the foreign file.  to: the recipe.  console: to print to.
    """
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for key, value in found.keys.items():
        table.add_row(key, Text(str(value)))
    console.print(table)
    for key, why in found.others.items():
        say(console, f"not taken: {key}: {why}", "yellow")
    name = to.stem if to.parent == Path("recipes") else to
    say(console, f"{to} is written; name your model and data there, then")
    say(console, f"  flowrun plan recipe={name}")
