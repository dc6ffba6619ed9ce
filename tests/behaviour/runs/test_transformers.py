"""Weights of `transformers` in and out: a folder of save_pretrained starts a run, and what the run
leaves is the model's again, tied weights or not, whatever the layout.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from flowrun.launcher.commands.export import export
from flowrun.launcher.job.job import Job
from flowrun.launcher.model.build import instantiate_model
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from flowrun.launcher.store import weight_files as weights
from support.nets.architectures import ARCHITECTURES
from support.nets.transformers_models import LENGTH, VOCABULARY
from support.runs.command import losses

DATA = f"""\
import torch


class Tokens:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        tokens = torch.randint(3, {VOCABULARY}, ({LENGTH},), generator=made)
        return {{"input_ids": tokens, "labels": tokens.clone()}}
"""
STEPS, LR = 2, 0.1
SAME = 1e-5  # relative: float32 sums in another order, as in behaviour/nets/test_architectures.py


@dataclass(frozen=True)
class Trained:
    """A run of two steps on stages 2 x tensor 2, with a checkpoint after each.

    given: the folder of save_pretrained that it started from.
    """

    recipe: str
    given: Path
    out: Path

    def model(self) -> Any:
        """With other weights than any that are given or trained."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return instantiate_model(load([self.recipe, "train.seed=9"]))

    def loaded(self, file: Path) -> Any:
        model = self.model()
        model.load_state_dict(load_file(file))
        return model

    def batch(self, step: int) -> dict[str, Tensor]:
        """What all ranks together read in a step."""
        job = Job(load([self.recipe, "train.micro_batches=1"]))
        return dict(job.materials.sampler(step, 0, slice(0, job.recipe.train.batch_size)))


OF_THE_LIBRARY = ("architectures", "model_type", "transformers_version", "dtype")


def recipe_of(name: str, tied: bool) -> dict[str, Any]:
    """An architecture of one block, with Megatron's pins, as a recipe file says it."""
    architecture = ARCHITECTURES[name]
    made = architecture.make(1).config
    assert isinstance(made, PretrainedConfig)
    said = {key: value for key, value in made.to_diff_dict().items() if key not in OF_THE_LIBRARY}
    config = {**said, "tie_word_embeddings": tied}
    return {
        "defaults": [{"/optim": "sgd"}, {"/launch": "virtual"}],
        "model": {
            "_target_": f"transformers.{architecture.name}",
            "config": {"_target_": f"transformers.{type(made).__name__}", **config},
        },
        "data": {"_target_": "tokens.Tokens"},
        "optim": {"lr": LR, "momentum": 0.0, "weight_decay": 0.0},
        "placement": {"stages": 2, "axes": {"tensor": 2}},
        "sbp": {pattern: {"tensor": f"S({dim})"} for pattern, dim in architecture.split.items()},
        "eval": {"batches": 0},
        "train": {"batch_size": 4, "micro_batches": 2, "steps": STEPS, "save_every": 1, "keep": 0},
    }


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("gpt2", True), id="gpt2 tied"),
        pytest.param(("gpt2", False), id="gpt2", marks=pytest.mark.thorough),
        pytest.param(("llama", True), id="llama tied", marks=pytest.mark.thorough),
        pytest.param(("llama", False), id="llama"),
    ],
)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trained]:
    name, tied = request.param
    place = tmp_path_factory.mktemp(name)
    (place / "tokens.py").write_text(DATA)
    file = place / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe_of(name, tied)))
    found = Trained(f"recipe={file}", place / "given", place / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(place)
        try:
            found.model().save_pretrained(found.given)
            run(load([found.recipe, f"model.weights={found.given}"]), found.out)
            yield found
        finally:
            sys.modules.pop("tokens", None)


@pytest.fixture(autouse=True)
def _there(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained.out.parent)


def from_folder(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return float(model(**batch).loss)


def logits_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**batch).logits


def test_the_first_loss_is_that_of_the_given_weights(trained: Trained) -> None:
    plain = loss_of(from_folder(trained.given), trained.batch(0))
    assert losses(trained.out)[0] == pytest.approx(plain, rel=SAME)
    assert loss_of(trained.model(), trained.batch(0)) == plain  # save_pretrained wrote them


def test_exported_weights_make_the_loss_that_the_layout_found(trained: Trained) -> None:
    file = export(trained.out, step=1, to=trained.out / "exported.safetensors")
    plain = loss_of(trained.loaded(file), trained.batch(1))
    assert losses(trained.out)[1] == pytest.approx(plain, rel=SAME)
    assert loss_of(trained.model(), trained.batch(1)) != pytest.approx(plain, rel=SAME)


def test_exported_weights_make_the_logits_of_a_plain_loop(trained: Trained) -> None:
    plain = from_folder(trained.given).train()
    optimizer = torch.optim.SGD(plain.parameters(), LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        plain(**trained.batch(step)).loss.backward()
        optimizer.step()
    models = trained.loaded(export(trained.out)), plain
    found, expected = (logits_of(model, trained.batch(STEPS)) for model in models)
    torch.testing.assert_close(found, expected, rtol=SAME, atol=SAME)


def test_transformers_opens_them_as_its_own(trained: Trained, tmp_path: Path) -> None:
    trained.model().config.save_pretrained(tmp_path)
    export(trained.out, to=tmp_path / "model.safetensors")
    found = logits_of(from_folder(tmp_path), trained.batch(0))
    expected = logits_of(trained.loaded(trained.out / weights.FILE), trained.batch(0))
    assert torch.equal(found, expected)
