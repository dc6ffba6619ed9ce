"""`flowrun export`: the weights of a run as one safetensors file, from any layout's checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from safetensors import safe_open

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.export_adapters import adapters_among, write_adapters, write_merged
from flowrun.launcher.commands.load_run import find_weights
from flowrun.launcher.recipe.recipe_errors import CommandLineError, one_of
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.run_files import RECIPE
from flowrun.launcher.terminal.units import size
from flowrun.launcher.urls.object_store import ObjectStore, each, is_url

FORMATS = ("safetensors", "hf")
_INDEX, _CONFIGS = ".index.json", ("config.json", "adapter_config.json")  # ends; names


def check_format(format: str, dtype: str, adapters: bool, tokenizer: str | None = None) -> None:
    """Check the options that say what is written.  Raises RecipeError.

    format: a word of FORMATS.  dtype: of the weights; empty: that of training.  adapters: True for
    these alone.  tokenizer: that goes with a folder of weights.
    """
    if format not in FORMATS:
        problem = f"there is {one_of(FORMATS)}."
        raise CommandLineError(f"--format {format}", problem)
    if adapters and format == "hf":
        problem = "adapters alone are peft's folder, which --adapters writes."
        raise CommandLineError("--adapters", problem, "Leave out --format.")
    if tokenizer and format != "hf":
        problem = "one file of weights has no tokenizer."
        raise CommandLineError(f"--tokenizer {tokenizer}", problem, "--format hf writes it.")
    if dtype and format != "hf":
        raise CommandLineError(
            f"--dtype {dtype}",
            "one file of weights has the dtypes of the training.",
            "--format hf writes others.",
        )


@contextmanager
def put_at(to: str | None, is_folder: bool) -> Iterator[str | None]:
    """Yield where to write.  For a URL that is a folder of this disk, whose files are put there
    once they are written: an index and a config last, which name the others.

    is_folder: a folder is written.  Raises CommandLineError for a URL that cannot be used,
    or whose folder has a model, and StoreError.
    """
    if to is None or not is_url(to):
        yield to
        return
    url, _, name = (to, "", "") if is_folder or to.endswith("/") else to.rpartition("/")
    try:
        store = ObjectStore.open(url, to)
    except RecipeError as error:
        raise CommandLineError(f"--to {to}", error.problem, error.instead) from error
    if is_folder and not store.find().keys().isdisjoint(_CONFIGS):
        problem = "it holds a model that would be overwritten."
        raise CommandLineError(f"--to {to}", problem, "Name a folder that is not there.")
    with TemporaryDirectory() as made:
        yield f"{made}/{name}"
        written = {file.name: file for file in Path(made).iterdir()}
        last = [one for one in written if one.endswith(_INDEX) or one in _CONFIGS]
        each(lambda one: store.put(one, written[one]), written.keys() - {*last})
        for one in sorted(last, key=_CONFIGS.__contains__):
            store.put(one, written[one])


def describe_file(file: Path, step: int = -1) -> str:
    """Return a line on what was written: of weights size, tensors, and the steps that trained them.

    step: of a file that does not say it.
    """
    if file.suffix != ".safetensors":
        return str(file)
    with safe_open(file, "pt") as opened:
        count = len(opened.keys())
    steps = max(step, weights.steps_of(file))
    return f"{file}: {size(file.stat().st_size)}, {count} tensors, step {steps}"


def export(
    run_folder: Path,
    step: int | None = None,
    to: Path | str | None = None,
    best: bool = False,
    adapters: bool = False,
) -> Path:
    """Write what a checkpoint holds, or what the run ended with; return the file.

    step: of a checkpoint; None: the newest weights.  to: the file, or the folder that it goes to,
    which is there or ends with /; None: the run's folder.  best: True for the checkpoint that is
    best by train.keep_best.  adapters: True for the adapters alone, in a folder; otherwise they are
    merged.  Raises RecipeError if there are no weights.
    """
    stored = find_weights(run_folder, step, best)
    trained = adapters_among(stored)
    if adapters:
        if trained is None:
            what = "this run trained no adapters."
            raise CommandLineError("--adapters", what, "Leave it out: all weights are written.")
        folder = Path(to) if to else own_folder(run_folder, f"adapters_step_{stored.step:08d}")
        write_adapters(stored, trained, folder, _base_of(run_folder))
        return folder
    file = _file_at(to) if to else None
    if trained is None and stored.path.is_file() and file in (None, stored.path):
        return stored.path
    kind = "merged" if trained else "weights"
    file = file or run_folder / f"{kind}_step_{stored.step:08d}.safetensors"
    write_merged(stored, trained, file)
    return file


def own_folder(run_folder: Path, name: str) -> Path:
    """Return a folder in a run's, which may be somebody else's.  Raises CommandLineError for a
    link, which would lead out of it.
    """
    folder = run_folder / name
    if folder.is_symlink():
        raise CommandLineError(str(folder), "it is a link.", "--to FOLDER names another.")
    return folder


def _base_of(run_folder: Path) -> str:
    """Return where the weights of the base came from, by the recipe; empty: it does not say."""
    with suppress(OSError, ValueError, yaml.YAMLError, AttributeError):
        keys = yaml.safe_load((run_folder / RECIPE).read_text(encoding="utf-8"))
        return str(keys["model"].get("weights") or "")
    return ""


def _file_at(to: Path | str) -> Path:
    path = Path(to)
    return path / weights.FILE if path.is_dir() or str(to).endswith("/") else path
