"""`flowrun export`: the weights of a run as one safetensors file, from any layout's checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from flowrun.engine.runtime.drivers import logical_checkpoint as disk
from flowrun.engine.runtime.rank.shards import Shard, make_whole_shard
from flowrun.launcher.commands.export_adapters import Stored, adapted_recipe, export_adapted
from flowrun.launcher.commands.resume import checkpoint_of
from flowrun.launcher.recipe.recipe_errors import PlacedError
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import find_all
from flowrun.launcher.store.tensor_file import Contents, write_whole


def export(
    run_folder: Path,
    step: int | None = None,
    to: Path | None = None,
    best: bool = False,
    adapters: bool = False,
) -> Path:
    """Write what a checkpoint holds, or what the run ended with; return the file.

    run_folder: of the run.  step: of a checkpoint; None: the newest weights.  to: the file; None: a
    file in the run's folder.  best: True for the checkpoint that is best by train.keep_best.
    adapters: True for the adapters alone, in a folder; otherwise they are merged.
    Raises RecipeError if there are no weights.
    """
    if best and step is None:
        step = checkpoint_of(run_folder, best=True).step
    adapted = adapted_recipe(run_folder)
    if adapters and not adapted:
        what = "this run trained no adapters."
        raise PlacedError(
            "command line", "--adapters", what, "Leave it out: all weights are written."
        )
    ended = run_folder / weights.FILE
    found = find_all(run_folder)
    trained = weights.steps_of(ended) if ended.exists() else -1
    if trained >= 0 and (step == trained or step is None) and all(c.step <= trained for c in found):
        if adapted:
            return export_adapted(adapted, Stored.of_file(ended), run_folder, to, alone=adapters)
        if to is None or to.absolute() == ended.absolute():
            return ended
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ended, to)
        return to
    if not ended.exists() and not found:
        raise PlacedError("command line", str(run_folder), *_why_nothing(run_folder))
    checkpoint = checkpoint_of(run_folder, step)
    if adapted:
        stored = Stored.of_checkpoint(checkpoint.folder, checkpoint.step, checkpoint.about().names)
        return export_adapted(adapted, stored, run_folder, to, alone=adapters)
    names = weights.of_model(checkpoint.about().names)
    contents = disk.read_contents(checkpoint.folder)
    to = to or run_folder / f"weights_step_{checkpoint.step:08d}.safetensors"
    to.parent.mkdir(parents=True, exist_ok=True)
    file = weights.file_of(to, contents, names, checkpoint.step)
    write_whole([file], _values(checkpoint.folder, {name: contents[name] for name in file.starts}))
    return to


def _why_nothing(run_folder: Path) -> tuple[str, str]:
    """Say what is wrong with a folder that has no weights, and what to do."""
    if not run_folder.is_dir():
        return "there is no such folder.", "A run says at its end where everything of it is."
    if weights.shards_in(run_folder):
        return (
            "the ranks of several hosts left their shards here, and nobody has joined them.",
            f"python -m flowrun.launcher.weights {run_folder} OTHER_FOLDER does.",
        )
    return (
        f"it has neither {weights.FILE} nor a complete checkpoint.",
        f"A run ends with {weights.FILE} unless train.save=false, and saves a checkpoint every N "
        "steps with train.save_every=N.",
    )


def _values(folder: Path, contents: Contents) -> Iterator[Shard]:
    """Yield one tensor after another."""
    for name in contents:
        yield make_whole_shard(name, disk.read_whole(folder, [name])[name])
