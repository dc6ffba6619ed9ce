"""The recipes of docs/how_to/loops.md train as the loop that a person would write for each."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from flowrun.models.gpt import GPT
from flowrun.models.mlp import DeepMLP
from flowrun.models.reference import WithReference

STEPS = 20
Loss = Callable[[dict[str, Tensor]], Tensor]


def small_gpt(depth: int) -> GPT:
    return GPT(vocabulary=256, context=64, depth=depth, heads=2, width=32)


def distillation() -> tuple[nn.Module, Loss]:
    """Hinton et al. 2015, section 2, by torch's divergence."""
    student, teacher = small_gpt(2), small_gpt(4)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        own = student(batch["tokens"]).flatten(0, 1)
        with torch.no_grad():
            taught = teacher(batch["tokens"]).flatten(0, 1)
        soft = F.kl_div(
            F.log_softmax(own / 2, -1), F.softmax(taught / 2, -1), reduction="batchmean"
        )
        return 0.5 * 4 * soft + 0.5 * F.cross_entropy(own, batch["targets"].flatten())

    return student, loss


def preferences() -> tuple[nn.Module, Loss]:
    """Rafailov et al. 2023, appendix B: log-probabilities gathered, prompts masked."""
    policy = small_gpt(2)
    reference = copy.deepcopy(policy)

    def log_p(model: nn.Module, batch: dict[str, Tensor], k: int) -> Tensor:
        targets = batch["targets"][:, k]
        known = targets != -100
        each = model(batch["tokens"][:, k]).log_softmax(-1)
        return (each.gather(-1, (targets * known)[..., None])[..., 0] * known).sum(-1)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            theirs = log_p(reference, batch, 0) - log_p(reference, batch, 1)
        ours = log_p(policy, batch, 0) - log_p(policy, batch, 1)
        return -F.logsigmoid(0.1 * (ours - theirs)).mean()

    return policy, loss


def contrast() -> tuple[nn.Module, Loss]:
    """Chen et al. 2020, algorithm 1: pair by pair."""
    encoder = DeepMLP([64, 128, 128, 32])

    def loss(batch: dict[str, Tensor]) -> Tensor:
        z = torch.cat([encoder(batch["images"][:, k]) for k in (0, 1)])
        s = torch.exp(F.cosine_similarity(z[:, None], z, dim=-1) / 0.5)
        one, n = torch.arange(len(z)), len(z) // 2
        return -(s[one, (one + n) % len(z)] / (s.sum(1) - s[one, one])).log().mean()

    return encoder, loss


SMALL = "model.model.depth=2 model.model.width=32 model.model.heads=2 data{}.max_bytes=100000"
TEACHER = "model.reference.width=32 model.reference.heads=2"
# recipe -> plain loop, name of the model in the recipe's, what makes it smaller
RECIPES = {
    "distil_gpt": (distillation, "model.", f"{SMALL.format('')} {TEACHER}"),
    "dpo_gpt": (preferences, "model.", SMALL.format(".chosen")),
    "simclr": (contrast, "", ""),
}
LAYOUTS = {
    "single": "placement.axes.data=1",
    "data 2": "",
    "tensor 2": "placement.axes.data=1 placement.axes.tensor=2",
    "stages 2": "placement.axes.data=1 placement.stages=2 train.micro_batches=2",
    "ZeRO 3": "zero.stage=3 zero.min_size=1",
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_as_a_plain_loop_does(name: str, layout: str, tmp_path: Path) -> None:
    make, prefix, smaller = RECIPES[name]
    words = [*smaller.split(), *LAYOUTS[layout].split(), "launch=virtual", "eval.batches=0"]
    recipe = load(
        [
            f"recipe={name}",
            *words,
            f"train.steps={STEPS}",
            "train.batch_size=8",
            "optim.eps=1e-5",
            "log=[]",
        ]
    )
    run(recipe, tmp_path)
    torch.manual_seed(recipe.train.seed)
    model, loss_of = make()
    optim, losses = recipe.optim, []
    optimizer = torch.optim.AdamW(
        model.parameters(), optim.lr, optim.betas, optim.eps, optim.weight_decay
    )
    sampler, parts = Job(recipe, values=False).materials.sampler, recipe.train.micro_batches
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [sampler(step, k, slice(0, 8 // parts)) for k in range(parts)]
        found = torch.stack([loss_of(batch) for batch in batches]).mean()
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        optimizer.step()
        losses.append(found.item())
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
    weights = load_file(tmp_path / "weights.safetensors")
    for key, value in model.state_dict().items():
        torch.testing.assert_close(weights[prefix + key], value, rtol=1e-5, atol=1e-5)


def test_a_reference_is_read_from_a_file_and_drops_nothing_out(tmp_path: Path) -> None:
    kept = GPT(vocabulary=8, context=4, depth=1, heads=1, width=4, dropout=0.5)
    save_file(kept.state_dict(), file := tmp_path / "kept.safetensors")
    tokens = torch.arange(4).expand(3, 2, 4)
    expected = kept.eval()(tokens.flatten(0, 1)).unflatten(0, (3, 2))
    for reference in (None, copy.deepcopy(kept).train()):
        other = GPT(vocabulary=8, context=4, depth=1, heads=1, width=4, dropout=0.5)
        both = WithReference(other, reference, str(file)).train()
        torch.testing.assert_close(both(tokens)["reference"], expected)
        own = both.eval()(tokens)["model"]
        assert torch.allclose(own, expected) == (reference is None)
