"""The folder of a run that ended, without the run: its recipe, and weights as they were drawn."""

import json
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file

from flowrun.launcher.model.adapters import describe_adapters
from flowrun.launcher.model.build import instantiate_model
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.run_files import RECIPE
from flowrun.launcher.store.run_tokenizer import keep_tokenizer

TINY = (
    "recipe=gpt_dp",
    "model.depth=1",
    "model.width=16",
    "model.heads=2",
    "data.length=8",
    "data.max_bytes=20000",
)


def save_run(folder: Path, *overrides: str, step: int = 3) -> Path:
    """Write what `flowrun` would have left in the folder after `step` steps; return the folder."""
    recipe = load(list(overrides or TINY))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECIPE).write_text(recipe.to_yaml())
    keep_tokenizer(recipe.data, folder)
    model = instantiate_model(recipe)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    metadata = {"format": "pt", "steps": str(step)}
    if adapters := describe_adapters(model):
        metadata["adapters"] = json.dumps(asdict(adapters))
    save_file(state, folder / weights.FILE, metadata)
    return folder
