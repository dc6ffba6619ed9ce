from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from flowrun.launcher.bench.peers.peer_rank import layout
from flowrun.launcher.bench.peers.setting import Setting, arguments, chosen, optimizer
from flowrun.launcher.bench.suite import KINDS, Peer
from flowrun.launcher.commands.plain_loop import plain_loop
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.schema import Optim
from flowrun.models.gpt import GPT


def test_a_star_is_one_part_of_a_name() -> None:
    gpt = GPT(vocabulary=32, context=8, depth=2, heads=2, width=4, qkv_apart=True)
    expected = ["embed", "blocks.0", "blocks.1", "head"]
    assert list(chosen(gpt, ["embed", "blocks.*", "head"])) == expected
    assert list(chosen(gpt, ["blocks.*.attn.[qk]"])) == [
        f"blocks.{k}.attn.{name}" for k in (0, 1) for name in "qk"
    ]


def test_a_pattern_that_names_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no module 'block'"):
        chosen(nn.Linear(2, 2), ["block"])


@pytest.mark.parametrize(
    ("optim", "made"),
    [
        (Optim(lr=0.1, betas=(0.8, 0.9), weight_decay=0.2), {"betas": (0.8, 0.9), "eps": 1e-8}),
        (Optim(name="sgd", momentum=0.9, nesterov=True), {"momentum": 0.9, "nesterov": True}),
        (Optim(name="adagrad", eps=1e-10), {"eps": 1e-10}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_optimizer_has_the_recipes_numbers_and_is_fused(
    optim: Optim, made: dict[str, Any]
) -> None:
    update = optimizer(optim, nn.Linear(2, 2).parameters())
    expected = {"lr": optim.lr, "weight_decay": optim.weight_decay, "fused": True, **made}
    assert {key: update.param_groups[0][key] for key in expected} == expected


def test_sparse_gradients_are_not_fused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    update = optimizer(Optim(name="adagrad", lr=1.0), table.parameters(), sparse=True)
    before = table.weight.detach().clone()
    table(torch.tensor([1])).sum().backward()  # type: ignore[no-untyped-call]
    with torch.sparse.check_sparse_tensor_invariants(True):  # torch warns unless told
        update.step()
    assert (table.weight != before).any(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("key", ["clip_norm", "warmup_steps", "ema"])
def test_what_a_peer_does_not_do_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=rf"no optim\.{key}"):
        arguments(replace(Optim(), **{key: 1}))


@pytest.mark.filterwarnings("ignore:.torch.jit.")  # torch's own import
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_layout(kind: str) -> None:
    assert layout(kind).__name__ == kind


def test_a_plain_loop_trains_as_the_recipe_says() -> None:
    """Beside the loop that `flowrun verify` holds its layouts beside, micro-batches summed."""
    recipe = load(
        ["recipe=mlp_data_parallel", "train.steps=3", "train.micro_batches=2", "eval.batches=0"]
    )
    setting = Setting(
        job=Job(recipe),
        peer=Peer("single"),
        rank=0,
        world=1,
        device=torch.device("cpu"),
        compiled=False,
    )
    step = layout("single")(setting)
    losses = [float(step()) for _ in range(3)]
    assert losses == pytest.approx(plain_loop(recipe).losses, rel=1e-5)


@pytest.mark.parametrize("whole", [False, True])
def test_a_loss_is_compiled_with_the_model_where_that_is_asked_for(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def remember(function: Any) -> Any:
        compiled.append("loss")
        return function

    monkeypatch.setattr(torch, "compile", remember)
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append("model"))
    recipe = load(["recipe=mlp_data_parallel", "train.steps=2", "eval.batches=0"])
    peer = Peer("single", whole=whole)
    step = layout("single")(
        Setting(
            job=Job(recipe), peer=peer, rank=0, world=1, device=torch.device("cpu"), compiled=True
        )
    )
    assert [float(step()) for _ in range(2)] == pytest.approx(plain_loop(recipe).losses, rel=1e-5)
    assert compiled == (["loss"] if whole else ["model"])
