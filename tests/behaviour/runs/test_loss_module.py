"""A loss that is a module: its parameters and buffers are trained, saved and sharded."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run

CODE = """
import torch
from torch import nn
from torch.nn import functional

class Vectors(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(64, 16, generator=g), torch.randint(8, (64,), generator=g)
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.h = nn.Linear(16, 16), nn.Linear(16, 8)
    def forward(self, x):
        return self.h(torch.relu(self.a(x)))

class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
    def forward(self, output, batch):
        self.calls += 1
        return functional.cross_entropy(output * self.scale, batch["y"])
"""
RECIPE = """
defaults: [/optim: sgd, /launch: virtual]
model: {_target_: lossy.Net}
data: {_target_: lossy.Vectors}
task: {loss: {_target_: lossy.Loss}}
optim: {lr: 0.1, momentum: 0.9, groups: {"task.loss.*": {lr: 0.02}}}
eval: {fraction: 0.0, batches: 0}
train: {batch_size: 16, steps: 3}
"""


def plain(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the state of the loss, of an ordinary loop."""
    import lossy  # type: ignore[import-not-found]
    from torch.utils.data import default_collate

    from flowrun.models.sampling import sample_indices

    torch.manual_seed(0)
    model, criterion, data = lossy.Net(), lossy.Loss(), lossy.Vectors()
    groups = [{"params": model.parameters()}, {"params": criterion.parameters(), "lr": 0.02}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        rows = sample_indices(0, range(16 * step, 16 * step + 16), 64).tolist()
        batch = default_collate([data[k] for k in rows])
        optimizer.zero_grad()
        loss = criterion(model(batch["x"]), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, criterion.state_dict()


@pytest.mark.parametrize(
    "layout",
    [[], ["placement.axes={data: 2}", "zero.axis=data", "zero.stage=3", "zero.min_size=1"]],
)
def test_parameters_and_buffers_of_a_loss_are_the_trainings(
    layout: list[str], tmp_path: Path
) -> None:
    (tmp_path / "lossy.py").write_text(CODE)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    report = run(
        load([f"recipe={tmp_path / 'mine.yaml'}", "engine.cache=false", *layout]), tmp_path
    )
    losses, state = plain(tmp_path)
    assert report.last_loss == pytest.approx(losses[-1], rel=1e-5)
    found = load_file(tmp_path / "loss.safetensors")
    assert set(found) == {"scale", "calls"}
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert not [n for n in load_file(tmp_path / "weights.safetensors") if n.startswith("task.")]
