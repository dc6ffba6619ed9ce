import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.export import export
from flowrun.launcher.job.job import Job
from flowrun.launcher.model.build import instantiate_model
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from flowrun.launcher.store import weight_files as weights
from support.runs.command import losses
from support.runs.workplace import working_in

MODEL = """\
import torch
from torch import nn


class Tied(nn.Module):
    # A weight with two names, one that forward does not read, a buffer, and one that is not saved.
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.again = nn.Linear(width, 8)
        self.again.weight = self.first.weight
        self.output = nn.Linear(8, 4)
        self.unused = nn.Parameter(torch.rand(3))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("secret", torch.ones(8), persistent=False)

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        return self.output(self.again(self.first(x_BI)).relu() * self.scale + self.secret)


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch["labels"])
"""
RECIPE = """\
defaults: [/optim: sgd, /launch: virtual]
model: {_target_: tied.Tied}
data: {_target_: samples.Samples}
task: {inputs: {x_BI: images}, loss: {_target_: tied.loss}}
placement: {axes: {data: 2}}
train: {batch_size: 8, micro_batches: 2, save_every: 2}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with a run of 3 steps, in the folder `out`."""
    with working_in(tmp_path_factory.mktemp("tied")) as place:
        (place / "tied.py").write_text(MODEL)
        (place / "recipes" / "tied.yaml").write_text(RECIPE)
        run(load(["recipe=tied", "train.steps=3"]), place / "out")
        yield place


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def plain_loss(recipe_weights: Path, step: int) -> float:
    """Loss of plain torch on the batch of a step, with the weights of a file."""
    recipe = load(["recipe=tied", "train.micro_batches=1"])
    job, model = Job(recipe), instantiate_model(recipe)
    model.load_state_dict(load_file(recipe_weights))
    batch = job.materials.sampler(step, 0, slice(0, 8))
    with torch.no_grad():
        assert job.materials.task.loss is not None
        return float(job.materials.task.loss(model(batch["images"]), batch))


def test_a_run_leaves_every_name_of_the_state_dict(place: Path) -> None:
    state = instantiate_model(load(["recipe=tied"])).state_dict()
    found = weights.load(place / "out")
    assert found.keys() == state.keys()
    assert torch.equal(found["first.weight"], found["again.weight"])
    assert torch.equal(found["unused"], state["unused"])
    assert not torch.equal(found["first.weight"], state["first.weight"])


def test_the_newest_weights_are_those_that_the_run_ended_with(place: Path) -> None:
    assert export(place / "out") == place / "out" / weights.FILE


def test_a_folder_without_weights_says_why(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no such folder"):
        export(tmp_path / "nowhere")
    with pytest.raises(RecipeError, match=r"neither weights\.safetensors nor .*checkpoint"):
        export(tmp_path)


def test_the_weights_of_a_checkpoint_make_the_loss_of_the_next_step(place: Path) -> None:
    file = export(place / "out", step=2, to=place / "exported" / "at_2.safetensors")
    assert plain_loss(file, 2) == pytest.approx(losses(place / "out")[2], rel=1e-6)


def test_a_run_starts_from_the_weights_of_another(place: Path) -> None:
    file = place / "out" / weights.FILE
    run(load(["recipe=tied", f"model.weights={file}", "train.steps=1"]), place / "again")
    assert losses(place / "again")[0] == pytest.approx(plain_loss(file, 0), rel=1e-6)


# ---- files ---------------------------------------------------------------------------------------


@pytest.fixture
def state(place: Path) -> dict[str, torch.Tensor]:
    """A state of the model, other than the initial one."""
    return weights.load(place / "out")


def started(path: Path) -> dict[str, torch.Tensor]:
    """The state that ranks, and plain torch, start from there."""
    recipe = load(["recipe=tied", f"model.weights={path}"])
    job, plain = Job(recipe), instantiate_model(recipe).state_dict()
    state = {name: job.materials.initial[tensor] for name, tensor in job.names.items()}
    assert same(state, plain)
    return state


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def write_parts(state: dict[str, torch.Tensor], folder: Path) -> None:
    index = {name: f"part{k % 2}.safetensors" for k, name in enumerate(state)}
    for file in set(index.values()):
        save_file({n: v for n, v in state.items() if index[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


FOLDERS: dict[str, Callable[[dict[str, torch.Tensor], Path], object]] = {
    "one file, without the second name of a tied weight": lambda state, folder: save_file(
        {name: value for name, value in state.items() if name != "again.weight"},
        folder / "model.safetensors",
    ),
    "several files": write_parts,
    "torch": lambda state, folder: torch.save(state, folder / "pytorch_model.bin"),
}


@pytest.mark.parametrize("write", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_of_weights_is_read(
    write: Callable[..., object], state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    write(state, tmp_path)
    assert same(started(tmp_path), state)


def test_weights_of_another_type_are_converted(
    state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    halves = {name: value.bfloat16() for name, value in state.items()}
    save_file(halves, tmp_path / "half.safetensors")
    found = started(tmp_path / "half.safetensors")
    assert same(found, {name: value.float() for name, value in halves.items()})


def test_names_that_do_not_fit_are_told(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    changed = {n: v for n, v in state.items() if n != "output.bias"}
    save_file({**changed, "more": torch.ones(1), "unused": torch.ones(4)}, file)
    with pytest.raises(RecipeError) as caught:
        started(file)
    assert caught.value.where == "model.weights"
    _, missing, strange, shapes = caught.value.problem.splitlines()
    assert (missing, strange) == ("1 are missing: output.bias", "1 are not the model's: more")
    assert shapes == "1 have another shape: unused is (4,) there and (3,) here"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing.bin", "there is no file"),
        ("junk.safetensors", "cannot be read"),
        ("", "no weights"),
    ],
)
def test_what_holds_no_weights_is_refused(
    place: Path, tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "junk.safetensors").write_text("junk")
    with pytest.raises(RecipeError, match=rf"model\.weights\n.*{said}"):
        started(tmp_path / name)
