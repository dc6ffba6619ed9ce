"""Keys of DeepSpeed's and accelerate's files become a recipe; what does not is named."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from rich.console import Console

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.resume import _paths
from flowrun.launcher.commands.start.foreign_config import (
    ACCELERATE,
    DEEPSPEED,
    read_foreign,
    show_import,
    write_foreign,
)
from flowrun.launcher.recipe.compose import load, schema

DS = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 4,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu"},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_type": "linear", "warmup_num_steps": 10, "total_num_steps": 200},
    },
    "activation_checkpointing": {"partition_activations": True},
}
ACC = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 2,
    "machine_rank": 1,
    "main_process_ip": "node0",
    "main_process_port": 29501,
    "num_processes": 16,
    "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_activation_checkpointing": True},
}


def write(folder: Path, name: str, keys: Any) -> Path:
    text = json.dumps(keys) if name.endswith("json") else yaml.safe_dump(keys)
    (folder / name).write_text(text)
    return folder / name


def test_a_file_of_deepspeed_becomes_a_recipe(tmp_path: Path) -> None:
    found = write_foreign(write(tmp_path, "ds.json", DS), tmp_path / "r" / "mine.yaml")
    recipe = load([f"recipe={tmp_path}/r/mine.yaml"])
    assert (recipe.train.batch_size, recipe.train.micro_batches, recipe.train.steps) == (64, 4, 200)
    assert (recipe.zero.stage, recipe.zero.axis, recipe.precision.dtype) == (2, "data", "bf16")
    assert (recipe.optim.lr, recipe.optim.clip_norm, recipe.optim.warmup_steps) == (3e-4, 1.0, 10)
    assert recipe.train.loss_mean == "micro_batch"
    assert recipe.optim.schedule["total_iters"] == 190
    assert set(found.others) == {
        "train_micro_batch_size_per_gpu",
        "zero_optimization.offload_optimizer.device",
        "activation_checkpointing.partition_activations",
        "the number of ranks",
    }
    text = (tmp_path / "r" / "mine.yaml").read_text()
    assert all(f"# not taken: {key}: " in text for key in found.others)


def test_a_file_of_accelerate_becomes_a_recipe(tmp_path: Path) -> None:
    found = write_foreign(write(tmp_path, "a.yaml", ACC), tmp_path / "mine.yaml")
    recipe = load([f"recipe={tmp_path}/mine.yaml"])
    assert (recipe.num_ranks, recipe.zero.stage, recipe.precision.dtype) == (16, 3, "bf16")
    assert (recipe.launch.nnodes, recipe.launch.node_rank) == (2, 1)
    assert recipe.launch.rdzv_endpoint == "node0:29501"
    assert list(found.others) == ["fsdp_config.fsdp_activation_checkpointing"]


@pytest.mark.parametrize(
    ("keys", "other", "why"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type", "optim.update"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu", "4 x 1 x"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler.type", "logarithmic"),
        ({"train_batch_size": "many"}, "train_batch_size", "'many' is no value"),
        ({"zero_optimization": {"stage": 1, "x": 2}}, "zero_optimization.x", "no key of a recipe"),
    ],
)
def test_what_has_no_equal_is_named(tmp_path: Path, keys: Any, other: str, why: str) -> None:
    assert why in read_foreign(write(tmp_path, "ds.json", keys)).others[other]


def test_numbers_that_deepspeed_takes_in_silence_are_written(tmp_path: Path) -> None:
    keys = {"optimizer": {"params": {"lr": 3e-4}, "type": "Adam"}}
    found = read_foreign(write(tmp_path, "ds.json", keys))
    numbers: dict[str, Any] = {"lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    numbers |= {"name": "adamw", "clip_norm": 1.0}
    assert found.keys == {f"optim.{key}": value for key, value in numbers.items()}
    assert "clips at 1.0" in found.others["gradient_clipping"]


def test_every_row_names_keys_of_a_recipe() -> None:
    """A row that writes a key which a recipe does not have would be refused only by its user."""
    values: tuple[Any, ...] = (1, True, 0.5, "bf16", "AdamW", "FULL_SHARD", [0.9, 0.95])
    known = set(_paths(OmegaConf.to_container(schema()))) | {"placement.axes.data"}
    written = set()
    for turn in (*DEEPSPEED.values(), *ACCELERATE.values()):
        for value in values:
            with suppress(Exception):  # not a value of this key
                written |= set(turn(value, {"num_machines": 2}))
    assert len(written) > 15 and written <= known


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no key is known"):
        read_foreign(write(tmp_path, "x.yaml", {"some": 1}))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(RecipeError, match="cannot be read"):
        read_foreign(tmp_path / "bad.json")
    file = write(tmp_path, "ds.json", DS)
    with pytest.raises(RecipeError, match="there already"):
        write_foreign(file, file)


def test_a_person_reads_what_was_taken(tmp_path: Path) -> None:
    out = io.StringIO()
    found = read_foreign(write(tmp_path, "a.yaml", ACC))
    show_import(found, Path("mine.yaml"), Console(file=out, width=80))
    assert "placement.axes.data" in out.getvalue() and "recompute.modules" in out.getvalue()
    assert "flowrun plan recipe=mine.yaml" in out.getvalue()
