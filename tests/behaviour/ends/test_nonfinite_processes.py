"""Real processes: ranks come to rest after a step that is not finite, repeat it and name the op."""

import json
import re
from pathlib import Path

import pytest

from support.runs.command import Command, free_port, losses, run_folder, workplace

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


def test_ranks_name_the_op_and_keep_the_checkpoint_before_it(tmp_path: Path) -> None:
    place = workplace(tmp_path)
    (place / "net.py").write_text(NET)
    (place / "recipes" / "roots.yaml").write_text(RECIPE)
    ended = Command(place, "recipe=roots", run_folder(place / "out")).end()
    step = len(losses(place / "out")) - 1
    assert ended.status == 1
    assert f"step {step}, rank" in ended.err
    assert "makes nan of finite numbers: aten.sqrt.default of module root (net.py:" in ended.err
    newest = max(place.glob("out/checkpoints/step_*"))
    assert newest.name == f"step_{step:08d}"


def test_ranks_of_two_hosts_name_the_op(tmp_path: Path) -> None:
    place = workplace(tmp_path)
    (place / "net.py").write_text(NET)
    (place / "recipes" / "roots.yaml").write_text(RECIPE)
    meet = ("launch.nnodes=2", f"launch.rdzv_endpoint=127.0.0.1:{free_port()}")
    both = [Command(place, "recipe=roots", *meet, run_folder(place / f"host{k}")) for k in (0, 1)]
    ends = [command.end() for command in both]
    for host, ended in enumerate(ends):
        step = len(losses(place / f"host{host}")) - 1
        assert ended.status == 1
        assert re.search(r"step \d+, rank [01]", ended.err)
        assert "makes nan of finite numbers: aten.sqrt.default of module root" in ended.err
        assert step < 64  # the first epoch


def test_ranks_go_on_with_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    """Two epochs of 16 steps have a bad step each; all ranks in one process do the same."""
    place = workplace(tmp_path)
    (place / "net.py").write_text(NET)
    (place / "recipes" / "roots.yaml").write_text(RECIPE)
    changed = (
        "recipe=roots",
        "train.steps=32",
        "train.save_every=8",
        "train.on_nonfinite=rollback",
    )
    ended = Command(place, *changed, run_folder(place / "out")).end()
    assert (ended.status, ended.err) == (0, "")
    virtual = Command(place, *changed, "launch=virtual", run_folder(place / "virtual")).end()
    assert virtual.status == 0
    lines, same = (
        [*map(json.loads, (place / folder / "restarts.jsonl").read_text().splitlines())]
        for folder in ("out", "virtual")
    )
    assert [line["left_out"] for line in lines] == [line["left_out"] for line in same]
    assert len(lines) == 2
    assert all(
        first % 8 == 0 and last - first < 8 for first, last in (x["left_out"] for x in lines)
    )
    assert all("aten.sqrt.default of module root" in line["problem"] for line in lines)
    left_out = sum(last + 1 - first for first, last in (x["left_out"] for x in lines))
    assert f"{left_out} of 32 updates were left out" in ended.out
    assert _numbers(place / "out") == pytest.approx(_numbers(place / "virtual"), rel=1e-5)


def _numbers(folder: Path) -> list[float]:
    return [loss for loss in losses(folder) if loss is not None]
