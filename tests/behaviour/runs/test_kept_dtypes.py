"""precision.param_dtype and state_dtype in a run: what is kept, saved, resumed and refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.resume import checkpoint_of, compose_resumed
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.report.notes import notes
from flowrun.launcher.run import run
from support.runs.command import losses
from support.runs.workplace import workplace  # noqa: F401

RECIPE = """\
defaults: [/model: mlp, /data: digits, /optim: adamw, /launch: virtual]
model: {hidden: 16}
precision: {param_dtype: bf16, state_dtype: bf16, keep_fp32: [output.bias]}
placement: {axes: {data: 2}}
engine: {check_capture: false, cache: false}
eval: {fraction: 0}
train: {batch_size: 8, steps: 4, save_every: 2}
"""


@pytest.fixture(autouse=True)
def _recipe(workplace: Path) -> None:  # noqa: F811
    (workplace / "small.yaml").write_text(RECIPE)


def test_a_run_resumes_in_another_layout_with_the_same_rounding(workplace: Path) -> None:  # noqa: F811
    run(load(["recipe=small.yaml"]), workplace / "whole")
    run(load(["recipe=small.yaml", "train.steps=2"]), workplace / "parts")
    start = checkpoint_of(workplace / "parts")
    changes = ["train.steps=4", "placement.axes={data: 1, tensor: 2}"]
    run(compose_resumed(start, changes), workplace / "parts", start=start)
    assert losses(workplace / "parts") == pytest.approx(losses(workplace / "whole"), rel=1e-6)
    found = load_file(workplace / "whole" / "weights.safetensors")
    dtypes = {name: value.dtype for name, value in found.items()}
    assert dtypes["output.bias"] == torch.float32
    assert dtypes["hidden.weight"] == dtypes["hidden.bias"] == torch.bfloat16


def test_notes_say_what_a_weight_in_two_dtypes_takes(workplace: Path) -> None:  # noqa: F811
    said = "\n".join(notes(Job(load(["recipe=small.yaml"]), values=False)))
    assert "each is widened once a step" in said
    wide = ["precision.param_dtype=fp32", "precision.state_dtype=fp32"]
    said = "\n".join(notes(Job(load(["recipe=small.yaml", *wide]), values=False)))
    assert "precision.keep_fp32 has no effect: nothing is kept in bf16" in said


@pytest.mark.parametrize(
    ("changes", "where", "said"),
    [
        (["optim.ema=0.9"], "optim.ema", "would hardly move"),
        (["optim.sparse=lazy"], "optim.sparse", "precision.param_dtype is bf16"),
        (["precision.state_dtype=fp16"], "precision.state_dtype", "fp32 or bf16"),
        (["precision.keep_fp32=[outputs.*]"], "precision.keep_fp32", "'outputs.*'"),
    ],
)
def test_what_cannot_be_is_refused(changes: list[str], where: str, said: str) -> None:
    with pytest.raises(RecipeError) as refused:
        Job(load(["recipe=small.yaml", *changes]), values=False).training  # noqa: B018
    assert refused.value.where == where
    assert said in str(refused.value)


NAMES_ITS_DTYPE = """
import torch

class Net(torch.nn.Linear):
    def __init__(self, width=64):
        super().__init__(width, 10, dtype=torch.bfloat16)

    def forward(self, images, labels):
        wide = images.bfloat16().repeat(1, self.in_features // 64)
        return torch.nn.functional.cross_entropy(super().forward(wide).float(), labels)
"""


def test_a_model_that_names_its_dtype_keeps_it(workplace: Path) -> None:  # noqa: F811
    (workplace / "named.py").write_text(NAMES_ITS_DTYPE)
    file = workplace / "small.yaml"
    file.write_text(
        RECIPE.replace("/model: mlp, ", "").replace("{hidden: 16}", "{_target_: named.Net}")
    )
    plain = ["recipe=small.yaml", "precision={param_dtype: fp32, state_dtype: fp32, keep_fp32: []}"]
    run(load(plain), workplace / "run")
    found = load_file(workplace / "run" / "weights.safetensors")
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    again = load([f"recipe={workplace / 'run' / 'recipe.yaml'}"])
    assert again.precision.param_dtype == "model"
    large = Job(load([*plain, "model.width=2560000"]), values=False)  # called without numbers
    (said,) = (note for note in notes(large) if note.startswith("precision.param_dtype=model: "))
    assert "with weights in fp32 forward of Net fails: RuntimeError: " in said
    assert "(named.py:" in said
    wide = Job(load([*plain, "precision.dtype=bf16"]), values=False)
    assert wide.recipe.precision.param_dtype == "fp32"
    with pytest.raises(RecipeError, match=r"Write precision\.param_dtype: model"):
        Job(load(["recipe=small.yaml"]), values=False)
