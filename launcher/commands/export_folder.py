"""`flowrun export --format hf`: a run as a folder that `from_pretrained` loads.

transformers writes it: config.json, generation_config.json, the weights in shards with an index.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from flowrun.launcher.commands.export import describe_file, export
from flowrun.launcher.commands.export_adapters import adapted_recipe
from flowrun.launcher.commands.load_run import LoadedRun, load_run
from flowrun.launcher.model.build import instantiate_model
from flowrun.launcher.model.hugging_face import import_transformers, make_theirs
from flowrun.launcher.recipe.recipe_errors import PlacedError, one_of
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.text.codec import is_bytes, make_byte_tokenizer
from flowrun.models.data.corpus.tokenizer import load_tokenizer

FOLDER = "hf"  # in the run's folder
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD = "5GB"  # the most bytes of a file


@dataclass(frozen=True)
class ExportedFolder:
    """A folder that was written, and the steps that its weights were trained for."""

    folder: Path
    step: int

    def lines(self) -> list[str]:
        """Return a line on each file."""
        files = sorted(file for file in self.folder.iterdir() if file.is_file())
        return [describe_file(file, self.step) for file in files]


def export_folder(
    run_folder: Path,
    to: Path | None = None,
    *,
    step: int | None = None,
    best: bool = False,
    dtype: str = "",
    shard: str = SHARD,
) -> ExportedFolder:
    """Write a run's model as Hugging Face's folder.

    run_folder: of the run.  to: the folder; None: one in the run's.  step, best: which weights.
    dtype: a word of DTYPES; empty: that of training.  shard: the most bytes of a file.  Raises
    RecipeError for a model that transformers has no class for.
    """
    if dtype and dtype not in DTYPES:
        problem = f"there is {one_of(DTYPES)}."
        raise PlacedError("command line", f"--dtype {dtype}", problem)
    to = to or run_folder / FOLDER
    if to.is_file():
        raise PlacedError("command line", f"--to {to}", "this is a file, no folder.")
    import_transformers()
    run = _load_merged(run_folder, step, best)
    tokenizer = _tokenizer_of(run)
    theirs = make_theirs(run.model, _ids_of(tokenizer))
    if dtype:
        theirs = theirs.to(DTYPES[dtype])
    theirs.save_pretrained(to, max_shard_size=shard)
    if tokenizer is not None:
        tokenizer.save_pretrained(to)
    return ExportedFolder(to, run.step)


def _load_merged(run_folder: Path, step: int | None, best: bool) -> LoadedRun:
    """Make the model of a run, with its adapters merged into the weights if it trained any."""
    recipe = adapted_recipe(run_folder)
    run = load_run(run_folder, step, best)
    if recipe is None:
        return run
    if not recipe.adapters.modules:  # peft's own
        model: Any = run.model
        return replace(run, model=model.merge_and_unload().eval())
    base = replace(recipe, weights="", adapters=replace(recipe.adapters, modules=()))
    with TemporaryDirectory() as folder:
        file = export(run_folder, step, Path(folder) / weights.FILE, best)
        made = instantiate_model(base)
        made.load_state_dict(load_file(file))
    return LoadedRun(base, made.eval(), run.step)


def _tokenizer_of(run: LoadedRun) -> Any:
    """Return the tokenizer of a run as transformers has it; None where nothing names one."""
    if is_bytes(run.recipe.data):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=make_byte_tokenizer())
    named = run.recipe.data.get("tokenizer")
    return load_tokenizer(str(named)) if named else None


def _ids_of(tokenizer: Any) -> dict[str, int | None]:
    """Return the ids of a config that begin, end and pad a text."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name, None) for name in names}
