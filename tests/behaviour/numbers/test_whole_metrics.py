"""What is computed of all weights, or of all samples: PCGrad, and BLEU over gathered text."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from flowrun.launcher.store.weight_files import load as load_weights

MODULE = '''
import math
from collections import Counter

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Samples(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, k):
        g = torch.Generator().manual_seed(k)
        x, tokens = torch.randn(6, generator=g), torch.randint(5, (7,), generator=g)
        two = {"one": x[:3].sum() + 1, "other": x[3] - 2 * x[:3].sum()}
        return {"x": x, **two, "tokens": tokens, "targets": (2 * tokens + 1) % 5}


def project(losses, weights):
    """PCGrad (Yu et al. 2020) of two losses: their sum, weighted by what the gradients share."""
    if not torch.is_grad_enabled():
        return sum(losses)
    each = [torch.autograd.grad(loss, weights, retain_graph=True) for loss in losses]
    grads = [torch.cat([g.flatten() for g in of_loss]) for of_loss in each]
    conflict = torch.dot(*grads).clamp(max=0)
    shares = [(1 - conflict / g.square().sum()).detach() for g in grads]
    return sum(share * loss for share, loss in zip(shares, losses))


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(6, 8), nn.Linear(8, 2)

    def losses(self, x, one, other):
        y = self.heads(torch.tanh(self.body(x)))
        return [F.mse_loss(y[:, 0], one), F.mse_loss(y[:, 1], other)]

    def forward(self, x, one, other):
        return project(self.losses(x, one, other), [*self.parameters()])


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Embedding(5, 8), nn.Linear(8, 5)

    def forward(self, tokens):
        return self.heads(self.body(tokens))


WORDS = "the cat sat on mats".split()


def bleu(output, batch):
    return torch.cat([output.argmax(-1), batch["targets"]], 1).float()


def of_rows(rows):
    """BLEU of up to two words in a row, of the texts of all samples."""
    texts = [[" ".join(WORDS[int(k)] for k in half) for half in row.chunk(2)] for row in rows]
    said = [[[*zip(*(text.split()[k:] for k in range(n)))] for text in pair] for pair in texts
            for n in (1, 2)]
    counts = [(sum((Counter(a) & Counter(b)).values()), len(a)) for a, b in said]
    sizes = [[sum(of) for of in zip(*counts[n::2])] for n in (0, 1)]
    return math.prod(right / total for right, total in sizes) ** 0.5


bleu.of_rows = of_rows
'''
RECIPE = """
defaults: [/optim: sgd, /launch: virtual]
model: {_target_: metrics_mod.%s}
data: {_target_: metrics_mod.Samples}
task: %s
optim: {lr: 0.05, momentum: 0}
eval: {fraction: 0.3, batches: 3}
train: {batch_size: 4, steps: 6}
placement: {axes: {data: 1, tensor: 1}}
sbp: {"body.weight": {tensor: S(0)}}
log: []
"""
LAYOUTS = {
    "data 2": ("placement.axes.data=2",),
    "tensor 2": ("placement.axes.tensor=2",),
    "stages 2": ("placement.stages=2",),
    "ZeRO 3": ("placement.axes.data=2", "zero.stage=3", "zero.min_size=1"),
}


@pytest.fixture
def metrics_mod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "metrics_mod.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "metrics_mod", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    import metrics_mod  # type: ignore[import-not-found]

    return metrics_mod  # type: ignore[no-any-return]


def trained(model: str, task: str, keys: Sequence[str]) -> tuple[Job, Path]:
    Path("recipe.yaml").write_text(RECIPE % (model, task))
    recipe = load(["recipe=recipe.yaml", *keys])
    run(recipe, Path("out"))
    return Job(recipe), Path("out")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_of_all_weights_are_projected_as_in_a_plain_loop(
    metrics_mod: ModuleType, layout: Sequence[str]
) -> None:
    job, folder = trained("Tasks", "{}", layout)
    torch.manual_seed(job.recipe.train.seed)
    net, conflicts = metrics_mod.Tasks(), 0
    weights = dict(net.named_parameters())
    for step in range(6):
        batch = job.materials.sampler(step, 0, slice(0, 4))
        losses = net.losses(batch["x"], batch["one"], batch["other"])
        one, other = (flat_gradient(loss, [*weights.values()]) for loss in losses)
        dot = one @ other
        total, conflicts = one + other, conflicts + int(dot < 0)
        if dot < 0:  # each loses what it has along the other
            total = total - dot / (other @ other) * other - dot / (one @ one) * one
        pieces = total.split([weight.numel() for weight in weights.values()])
        for weight, piece in zip(weights.values(), pieces, strict=True):
            weight.data -= 0.05 * piece.view_as(weight)
    assert 1 < conflicts < 6
    found = load_weights(folder)
    assert all(torch.allclose(found[name], weights[name], atol=1e-6) for name in weights)


def flat_gradient(loss: Tensor, weights: Sequence[Tensor]) -> Tensor:
    found = torch.autograd.grad(loss, weights, retain_graph=True)
    return torch.cat([each.flatten() for each in found])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bleu_is_that_of_the_texts_of_all_samples(
    metrics_mod: ModuleType, layout: Sequence[str]
) -> None:
    loss = "{_target_: flowrun.models.losses.cross_entropy}"
    task = f"{{loss: {loss}, metrics: {{bleu: {{_target_: metrics_mod.bleu}}}}}}"
    _, folder = trained("Translator", task, layout)
    net = metrics_mod.Translator()
    net.load_state_dict(load_weights(folder))
    held_out = [metrics_mod.Samples()[k] for k in range(28, 40)]
    tokens, targets = (
        torch.stack([item[key] for item in held_out]) for key in ("tokens", "targets")
    )
    expected = metrics_mod.of_rows(torch.cat([net(tokens).argmax(-1), targets], 1))
    found = json.loads((folder / "report.json").read_text())["validation"]["bleu"]
    assert found == pytest.approx(expected) and 0.01 < expected < 1
    by_batch = [
        metrics_mod.of_rows(torch.cat([net(tokens).argmax(-1), targets], 1)[k : k + 4])
        for k in (0, 4, 8)
    ]
    assert found != pytest.approx(sum(by_batch) / 3)  # a mean over batches is another number
