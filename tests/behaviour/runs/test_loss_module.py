"""A loss that is a module: its parameters and buffers are trained, saved and sharded."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowrun.launcher.commands.plain_loop import plain_loop
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from support.runs.command import losses

CODE = """
import torch
from torch import nn

class Loss(nn.Module):
    def __init__(self, target):
        super().__init__()
        self.target = target
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, output, batch):
        self.calls += 1
        return nn.functional.cross_entropy(output * self.scale, batch[self.target])
"""
GIVEN = (
    "recipe=small",
    "launch=virtual",
    "task.loss={_target_: lossy.Loss}",
    "optim.momentum=0.9",
    "optim.groups={task.loss.*: {lr: 0.02}}",
)


@pytest.mark.parametrize(
    "layout", [(), ("placement.axes.data=2", "zero.axis=data", "zero.stage=3", "zero.min_size=1")]
)
def test_parameters_and_buffers_of_a_loss_are_the_trainings(
    layout: tuple[str, ...], place: Path
) -> None:
    (place / "lossy.py").write_text(CODE)
    recipe = load([*GIVEN, *layout])
    run(recipe, place / "out")
    plain = plain_loop(recipe)
    assert losses(place / "out") == pytest.approx(plain.losses, rel=1e-5)
    found = load_file(place / "out" / "loss.safetensors")
    assert found.keys() == {"scale", "calls"} and found["calls"] == 4 * 2
    torch.testing.assert_close(found["scale"], plain.after["task.loss.scale"], rtol=1e-5, atol=0)
    kept = load_file(place / "out" / "weights.safetensors")
    assert not [name for name in kept if name.startswith("task.")]
