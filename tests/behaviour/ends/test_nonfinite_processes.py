"""Real processes: ranks come to rest after a step that is not finite, repeat it and name the op."""

import json
import re
from pathlib import Path

import pytest

from support.runs.command import Command, free_port, losses, run_folder

pytestmark = pytest.mark.processes

NET = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.root, self.output = nn.Linear(8, 16), Root(), nn.Linear(16, 4)

    def forward(self, input):
        return self.output(self.root(self.hidden(input).tanh(), input))


class Root(nn.Module):
    def forward(self, h, x):  # below 0 in one sample of 64
        return h + 0 * torch.sqrt(x.sum(-1, keepdim=True) - 2.2) * h


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch["labels"])
"""
RECIPE = """\
defaults: [/optim: adamw, /launch: local]
model: {_target_: net.Net}
task: {inputs: {input: images}, loss: {_target_: net.loss}}
data: {_target_: samples.Samples}
placement: {axes: {data: 2}}
eval: {batches: 0, fraction: 0.0}
engine: {check_capture: false, verify_every: 2}
train: {batch_size: 4, steps: 1000, save_every: 1}
"""


@pytest.fixture(autouse=True)
def roots(place: Path) -> None:
    """A recipe whose net takes the root of a negative number in one sample of 64."""
    (place / "net.py").write_text(NET)
    (place / "recipes" / "roots.yaml").write_text(RECIPE)


@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_name_the_op_and_keep_the_checkpoint_before_it(place: Path, hosts: int) -> None:
    meet = ("launch.nnodes=2", f"launch.rdzv_endpoint=127.0.0.1:{free_port()}")
    each = [place / f"host{k}" for k in range(hosts)]
    words = ("recipe=roots", *meet[: 2 * (hosts - 1)])
    commands = [Command(place, *words, run_folder(folder)) for folder in each]
    for ended, folder in zip(map(Command.end, commands), each, strict=True):
        step = len(losses(folder)) - 1
        assert ended.status == 1 and step < 64  # the first epoch
        assert re.search(r"step \d+, rank [01]", ended.err)
        assert "makes nan of finite numbers: aten.sqrt.default of module root (net.py:" in ended.err
        if hosts == 1:
            assert f"step {step}, rank" in ended.err
            assert max(folder.glob("checkpoints/step_*")).name == f"step_{step:08d}"


def test_ranks_go_on_with_the_weights_of_a_checkpoint(place: Path) -> None:
    """Two epochs of 16 steps have a bad step each; all ranks in one process do the same."""
    keys = ("train.steps=32", "train.save_every=8", "train.on_nonfinite=rollback")
    out, virtual = (
        Command(place, "recipe=roots", *keys, *more, run_folder(place / name)).end()
        for name, more in {"out": (), "virtual": ("launch=virtual",)}.items()
    )
    assert (out.status, out.err, virtual.status) == (0, "", 0)
    lines, same = (
        [*map(json.loads, (place / folder / "restarts.jsonl").read_text().splitlines())]
        for folder in ("out", "virtual")
    )
    spans = [line["left_out"] for line in lines]
    assert spans == [line["left_out"] for line in same] and len(spans) == 2
    assert all(first % 8 == 0 and last - first < 8 for first, last in spans)
    assert all("aten.sqrt.default of module root" in line["problem"] for line in lines)
    left_out = sum(last + 1 - first for first, last in spans)
    assert f"{left_out} of 32 updates were left out" in out.out
    numbers, others = (
        [loss for loss in losses(place / folder) if loss is not None]
        for folder in ("out", "virtual")
    )
    assert numbers == pytest.approx(others, rel=1e-5)
