"""`flowrun export --format hf`: a run as a folder that `from_pretrained` loads.

transformers writes it: config.json, generation_config.json, the weights in shards with an index.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.files import replacing_files
from flowrun.launcher.commands import load_run
from flowrun.launcher.commands.export import describe_file, own_folder
from flowrun.launcher.commands.export_adapters import adapters_among, write_merged
from flowrun.launcher.commands.load_run import LoadedRun
from flowrun.launcher.model.hugging_face.convert_models import (
    CONFIG,
    import_transformers,
    make_theirs,
)
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe_errors import CommandLineError, one_of
from flowrun.launcher.recipe.schema import BF16
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.run_files import RECIPE
from flowrun.launcher.store.run_tokenizer import use_own_tokenizer
from flowrun.launcher.text.codec import is_bytes, make_byte_tokenizer, read_tokenizer
from flowrun.models.llama import Llama

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FOLDER = "hf"  # in the run's folder
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD = "5GB"  # the most bytes of a file
_WEIGHTS = "model*.safetensors*"
_PEFT = "peft.get_peft_model"
_KNOWN = re.compile(
    r"flowrun\.models\.[\w.]+"
    r"|transformers\.[A-Z]\w*(Model|Config|For[A-Z]\w+)(\.from_(pretrained|config|dict))?"
)


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
    tokenizer: str | None = None,
) -> ExportedFolder:
    """Write a run's model as Hugging Face's folder.

    run_folder: of the run.  to: the folder; None: one in the run's.  step, best: which weights.
    dtype: a word of DTYPES; empty: that of training.  shard: the most bytes of a file.  tokenizer:
    a folder or a file; None: that of the run.  Raises RecipeError for a model that transformers has
    no class for, a tokenizer that is not there, and a folder that holds another model.
    """
    if dtype and dtype not in DTYPES:
        problem = f"there is {one_of(DTYPES)}."
        raise CommandLineError(f"--dtype {dtype}", problem)
    to = to or own_folder(run_folder, FOLDER)
    if to.is_file():
        raise CommandLineError(f"--to {to}", "this is a file, no folder.")
    _check_own(to, run_folder)
    import_transformers()
    run = load_run.text_run(_load_merged(run_folder, step, best))
    found = _tokenizer_of(run, tokenizer)
    theirs = make_theirs(run.model, {**_ids_of(found), **_positions_of(run)})
    if found is not None:
        _set_ids(theirs, _ids_of(found))
    precision = run.recipe.precision
    if precision.param_dtype == BF16 and not precision.keep_fp32:
        dtype = dtype or BF16
    if dtype:
        theirs = theirs.to(DTYPES[dtype])
    with replacing_files(to) as made:
        theirs.save_pretrained(made, max_shard_size=shard)
        if found is not None:
            found.save_pretrained(made)
        written = {file.name for file in made.iterdir()}
    for file in to.glob(_WEIGHTS):
        if file.name not in written:  # of an earlier export, in other shards
            file.unlink()
    return ExportedFolder(to, run.step)


def _check_own(to: Path, run_folder: Path) -> None:
    """Raise RecipeError for a folder that holds a model already, unless it is in the run's own."""
    if (to / CONFIG).exists() and to.resolve().parent != run_folder.resolve():
        raise CommandLineError(
            f"--to {to}",
            f"it holds a model ({CONFIG}) that would be overwritten.",
            "Name a folder that is not there, or remove this one.",
        )


def _load_merged(run_folder: Path, step: int | None, best: bool) -> LoadedRun:
    """Make the model of a run, with its adapters merged into the weights if it trained any.

    Only classes of flowrun.models and of transformers are made: the run may be somebody else's.
    Raises RecipeError for others.
    """
    stored = load_run.find_weights(run_folder, step, best)
    recipe = load_run.without_files(load([f"recipe={run_folder / RECIPE}"]))
    recipe = use_own_tokenizer(recipe, run_folder)
    adapters = adapters_among(stored)
    if adapters:
        wrapped = recipe.model["model"] if recipe.model["_target_"] == _PEFT else recipe.model
        recipe = replace(recipe, model=wrapped, adapters=replace(recipe.adapters, modules=()))
    _check_known(recipe.model, "model")
    with TemporaryDirectory() as folder:
        if adapters:
            write_merged(stored, adapters, file := Path(folder) / weights.FILE)
            stored = load_run.Stored.of_file(file)
        return LoadedRun(
            recipe, load_run.fill_model(recipe, stored.read(), run_folder, stored.step), stored.step
        )


def _check_known(node: object, where: str) -> None:
    """Raise RecipeError for a `_target_` that may be code of the recipe, or may fetch code."""
    if isinstance(node, Mapping):
        target = node.get("_target_")
        if target is not None and not _KNOWN.fullmatch(str(target)):
            raise RecipeError(
                f"{where}._target_",
                f"{target} may be code of the run's own, which export does not call.",
                "Without --format hf the weights are written, by the names of its state_dict.",
            )
        if node.get("trust_remote_code"):
            raise RecipeError(f"{where}.trust_remote_code", "export runs no code of a folder.")
    items = node.items() if isinstance(node, Mapping) else enumerate(_list_of(node))
    for key, value in items:
        _check_known(value, f"{where}.{key}")


def _list_of(node: object) -> Sequence[object]:
    return node if isinstance(node, list | tuple) else ()


def _tokenizer_of(run: LoadedRun, given: str | None) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer of a run as transformers has it; None where nothing names one.

    given: a folder or a file that goes before.  Raises RecipeError for one that is not there.
    """
    if given is None and is_bytes(run.recipe.data):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=make_byte_tokenizer())
    named = given or run.recipe.data.get("tokenizer")
    return read_tokenizer(Path(str(named))).tokenizer if named else None


def _ids_of(tokenizer: PreTrainedTokenizerFast | None) -> dict[str, int | None]:
    """Return the ids of a config that begin, end and pad a text."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name, None) for name in names}


def _positions_of(run: LoadedRun) -> dict[str, int]:
    """Return the argument of a config that says how many positions were trained, where the model
    has no table of them.
    """
    length = run.recipe.data.get("length")
    known = isinstance(run.model, Llama) and isinstance(length, int)
    return {"max_position_embeddings": int(length)} if known else {}  # type: ignore[arg-type]


def _set_ids(theirs: Any, ids: Mapping[str, int | None]) -> None:
    """Write the ids of a tokenizer into a model's config and generation config.

    An id that the tokenizer does not name stays, unless it is the one that the class of the config
    has by default.
    """
    for config in (theirs.config, getattr(theirs, "generation_config", None)):
        for name, value in ids.items() if config is not None else ():
            now = getattr(config, name, None)
            several = isinstance(now, list) and value in now  # it has more ends
            guessed = now is not None and now == getattr(type(theirs.config), name, None)
            if (value is not None and not several) or (value is None and guessed):
                setattr(config, name, value)
