"""A model from a folder of Hugging Face's that somebody else may have written.

No code of the folder runs, and what its config describes is compared with the bytes of its weights
before any memory is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Size, nn

from flowrun.engine.errors import refuse_as
from flowrun.engine.runtime.process.own_process import bound_work, run_in_child
from flowrun.launcher.model.hugging_face.convert_models import import_transformers
from flowrun.launcher.recipe.recipe_errors import CommandLineError

_WEIGHTS = ("*.safetensors", "*.bin")
# Memory that loading may take: times the bytes of weights (some have 4 bits); for a config alone.
_MOST_TIMES, _MORE_BYTES = 8, 64 << 20
_LOG = logging.getLogger(__name__)
_MOST_S = 20.0  # of a core, to make the largest model without memory


def load_text_model(folder: Path) -> nn.Module:
    """Return the causal language model of a folder.

    Raises CommandLineError for whatever is wrong with it; RecipeError without transformers.
    """
    transformers = import_transformers()

    def refuse(error: Exception) -> CommandLineError:
        reason = " ".join(str(error).split())[:600] or "nothing more is known"
        reason = reason if isinstance(error, _Unlike) else f"{type(error).__name__}: {reason}"
        return CommandLineError(
            str(folder),
            f"no causal language model can be read from it: {reason}",
            "It must be what transformers' save_pretrained writes: config.json, with the weights.",
        )

    with refuse_as(refuse):  # what a damaged file makes of libraries has no common class
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )

        def describe() -> int:
            with bound_work(f"the model of {folder}/config.json", _MOST_S), torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(
                    config, trust_remote_code=False
                )
            return sum(each.nbytes for each in (*model.parameters(), *model.buffers()))

        # in a process of its own: where the bound strikes, torch may be left with another device
        _check_size(run_in_child(describe, f"reading {folder}/config.json", _LOG), folder)
        found, differs = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # _check_weights names them
            output_loading_info=True,
        )
        _check_weights(differs["missing_keys"], differs["mismatched_keys"])
    assert isinstance(found, nn.Module), "transformers makes modules"
    return found


class _Unlike(ValueError):
    """The weights of a folder are not those of its config.json."""


def _check_weights(missing: Collection[str], others: Collection[tuple[str, Size, Size]]) -> None:
    """Raise ValueError for a weight that transformers would draw at random."""
    if others:
        name, held, described = min(others)
        raise _Unlike(
            f"its weights have {name} as {tuple(held)}, and config.json as {tuple(described)}"
        )
    if missing:
        raise _Unlike(f"its weights lack {min(missing)}, which config.json describes")


def _check_size(described: int, folder: Path) -> None:
    """Raise ValueError for a model of much more bytes than the weights of its folder."""
    held = sum(file.stat().st_size for one in _WEIGHTS for file in folder.glob(one))
    if described > _MOST_TIMES * held + _MORE_BYTES:
        raise _Unlike(
            f"config.json describes a model of {described:,} bytes, and its weights are {held:,}"
        )
