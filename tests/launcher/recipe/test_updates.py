"""Several updates in a step train as the loop that a person would write."""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import default_collate

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.resume import find_continuation
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from flowrun.models.sampling import Order, sample_indices
from support.nets import two_nets
from support.runs.workplace import end, place, workplace

__all__ = ["end", "place", "workplace"]

STEPS, SAMPLES = 8, 16
CRITIC = {
    "name": "critic",
    "loss": {"_target_": "two_nets.critic_loss"},
    "parameters": "critic.*",
    "optim": {"lr": 1e-3},
}
GENERATOR = {
    "name": "generator",
    "loss": {"_target_": "two_nets.generator_loss"},
    "parameters": ["generator.*"],
    "every": 2,
    "optim": {"lr": 5e-3},
}
ASCENT = {
    "name": "ascent",
    "loss": {"_target_": "two_nets.squares"},
    "parameters": "*",
    "optim": {"_target_": "two_nets.ascend", "lr": 1.0, "clip_norm": 0.05},
}
DESCENT = {
    "name": "descent",
    "loss": {"_target_": "two_nets.squares"},
    "parameters": "*",
    "optim": {"_target_": "two_nets.descend", "lr": 0.05},
}
HOLD = {
    "name": "real",
    "loss": {"_target_": "two_nets.real_squares"},
    "parameters": "critic.*",
    "optim": {"_target_": "two_nets.hold"},
}
JOIN = {
    "name": "made",
    "loss": {"_target_": "two_nets.made_squares"},
    "parameters": "critic.*",
    "optim": {"_target_": "two_nets.join", "lr": 0.05},
}
GAN, SAM, PCGRAD = [CRITIC, GENERATOR], [ASCENT, DESCENT], [HOLD, JOIN]
LAYOUTS = {
    "single": "",
    "data 2": "placement.axes.data=2",
    "tensor 2": "placement.axes.tensor=2 sbp={critic.0.weight:{tensor:S(0)}}",
    "stages 2": "placement.stages=2 train.micro_batches=2",
    "ZeRO 1": "placement.axes.data=2 zero.stage=1 zero.min_size=1",
    "ZeRO 3": "placement.axes.data=2 zero.stage=3 zero.min_size=1",
}


def write_recipe(place: Path, updates: object, **more: Any) -> None:
    (place / "two_nets.py").write_text(Path(two_nets.__file__).read_text())
    recipe: dict[str, Any] = {
        "defaults": [{"/optim": "adamw"}, {"/launch": "virtual"}],
        "model": {"_target_": "two_nets.TwoNets"},
        "data": {"_target_": "two_nets.Points"},
        "updates": updates,
        "train": {"batch_size": SAMPLES, "steps": STEPS},
        "optim": {"weight_decay": 0.0, "clip_norm": 0.0},
        "eval": {"batches": 0},
        "log": [],
    }
    given = {key: {**recipe[key], **more.get(key, {})} for key in ("model", "data", "optim")}
    (place / "own.yaml").write_text(yaml.safe_dump({**recipe, **given}))


def batches(order: Order | None = None) -> Iterator[Mapping[str, Tensor]]:
    data = two_nets.Points()
    for step in range(STEPS):
        numbers = range(step * SAMPLES, (step + 1) * SAMPLES)
        chosen = sample_indices(0, numbers, len(data), order)
        yield default_collate([data[k] for k in chosen.tolist()])


def plain_gan(
    model: two_nets.TwoNets,
    critic_loss: Callable[..., Tensor] = two_nets.critic_loss,
    order: Order | None = None,
    frozen_until: int = 0,
) -> list[float]:
    """frozen_until: of each net's first layer, in updates of the net."""
    critic = torch.optim.AdamW(model.critic.parameters(), 1e-3, (0.9, 0.95), weight_decay=0)
    generator = torch.optim.AdamW(model.generator.parameters(), 5e-3, (0.9, 0.95), weight_decay=0)
    losses = []
    for step, batch in enumerate(batches(order)):
        turns = [(critic, critic_loss, step), (generator, two_nets.generator_loss, step // 2)]
        for optimizer, loss_of, number in turns[: 1 if step % 2 else 2]:
            model.zero_grad()
            loss = loss_of(model(**batch), batch)
            loss.backward()
            for first in (model.critic[0], model.generator[0]) if number < frozen_until else ():
                first.zero_grad()
            optimizer.step()
            losses.append(loss.item())
    return losses


def plain_sam(model: two_nets.TwoNets) -> list[float]:
    """Foret et al. 2021, algorithm 1, with a radius of 0.05."""
    losses = []
    for batch in batches():
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for turn in range(2):
            model.zero_grad()
            loss = two_nets.squares(model(**batch), batch)
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
                for parameter, old, gradient in zip(
                    model.parameters(), before, gradients, strict=True
                ):
                    step = gradient * 0.05 / norm if not turn else -0.05 * gradient
                    parameter.copy_(old + step)
    return losses


def plain_pcgrad(model: two_nets.TwoNets) -> list[float]:
    """Yu et al. 2020, algorithm 1, weight by weight."""
    losses, weights, conflicts = [], list(model.critic.parameters()), 0
    for batch in batches():
        found = [
            loss(model(**batch), batch) for loss in (two_nets.real_squares, two_nets.made_squares)
        ]
        losses += [loss.item() for loss in found]
        both = [torch.autograd.grad(loss, weights) for loss in found]
        for weight, one, other in zip(weights, *both, strict=True):
            dot, step = (one * other).sum(), one + other
            if dot < 0:
                conflicts += 1
                step = step - dot / other.square().sum() * other - dot / one.square().sum() * one
            weight.data -= 0.05 * step
    assert conflicts
    return losses


def fresh_model() -> two_nets.TwoNets:
    torch.manual_seed(0)
    return two_nets.TwoNets()


def losses_of(folder: Path, names: list[str]) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ["loss", *(f"loss/{name}" for name in names)]
    return [line[key] for line in lines for key in keys if key in line]


def assert_equal(weights: Mapping[str, Tensor], model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


CASES = {
    **{f"alternating, {name}": (GAN, plain_gan, layout) for name, layout in LAYOUTS.items()},
    **{
        f"two tasks, {name}": (PCGRAD, plain_pcgrad, LAYOUTS[name])
        for name in ("tensor 2", "stages 2", "ZeRO 3")
    },
    **{f"two passes, {name}": (SAM, plain_sam, LAYOUTS[name]) for name in ("stages 2", "ZeRO 3")},
}


@pytest.mark.parametrize(("updates", "plain", "layout"), CASES.values(), ids=CASES)
def test_updates_of_a_step_are_those_of_a_plain_loop(
    updates: list[Any], plain: Callable[[two_nets.TwoNets], list[float]], layout: str, place: Path
) -> None:
    write_recipe(place, updates)
    run(load(["recipe=own.yaml", *layout.split()]), place / "out")
    model = fresh_model()
    expected = plain(model)
    assert losses_of(place / "out", [updates[1]["name"]]) == pytest.approx(expected, rel=1e-5)
    assert_equal(load_file(place / "out" / "weights.safetensors"), model)


KEYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a net that forward moves": (
        {"model": {"_target_": "two_nets.SlowCritic"}},
        {"critic_loss": two_nets.slow_loss},
    ),
    "a gradient penalty": (
        {"model": {"_target_": "two_nets.Penalised"}},
        {"critic_loss": two_nets.penalised_loss},
    ),
    "data.order": (
        {"data": {"order": {"_target_": "two_nets.backwards"}}},
        {"order": partial(two_nets.backwards, num_samples=64)},
    ),
    "frozen_until": ({"optim": {"groups": {"*.0.*": {"frozen_until": 3}}}}, {"frozen_until": 3}),
}


@pytest.mark.parametrize("layout", ["stages 2", "ZeRO 3"])
@pytest.mark.parametrize("name", KEYS)
def test_updates_go_with_other_parts_of_a_loop(name: str, layout: str, place: Path) -> None:
    keys, plain = KEYS[name]
    loss = plain.get("critic_loss", two_nets.critic_loss).__name__
    critic = {**CRITIC, "loss": {"_target_": f"two_nets.{loss}"}}
    write_recipe(place, [critic, GENERATOR], **keys)
    words = ["train.save_every=3", "train.keep=0", *LAYOUTS[layout].split()]
    words = [word for word in words if not word.startswith("train.micro")]  # a forward moves it
    run(load(["recipe=own.yaml", *words]), place / "out")
    torch.manual_seed(0)
    kind = keys.get("model", {"_target_": "two_nets.TwoNets"})["_target_"].split(".")[1]
    model = getattr(two_nets, kind)()
    expected = plain_gan(model, **plain)
    assert losses_of(place / "out", ["generator"]) == pytest.approx(expected, rel=1e-5)
    assert_equal(load_file(place / "out" / "weights.safetensors"), model)
    recipe, start = continued(place, words[2:])
    run(recipe, place / "out", start=start)
    assert_equal(load_file(place / "out" / "weights.safetensors"), model)


def continued(place: Path, words: list[str]) -> Any:
    """What a run goes on with that ended after step 3, with other words."""
    for file in ("weights.safetensors", "report.json"):
        (place / "out" / file).unlink()
    for step in (6, 8):
        for file in (place / "out" / "checkpoints" / f"step_{step:08}").iterdir():
            file.unlink()
    recipe, start = find_continuation(load(["recipe=own.yaml", *words]), place / "out")
    assert start and start.step == 3
    return recipe, start


def test_a_run_resumed_between_two_updates_is_one_that_never_stopped(place: Path) -> None:
    write_recipe(place, GAN)
    words = ["recipe=own.yaml", "placement.axes.data=2", "train.save_every=3", "train.keep=0"]
    run(load(words), place / "out")
    whole = load_file(place / "out" / "weights.safetensors")
    recipe, start = continued(place, [*words[2:], "zero.stage=0"])
    run(recipe, place / "out", start=start)
    again = load_file(place / "out" / "weights.safetensors")
    for name, value in whole.items():
        torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-6)


def test_what_is_foreseen_is_of_all_updates_of_a_step(place: Path) -> None:
    write_recipe(place, GAN)
    words = ["recipe=own.yaml", "placement.axes.data=2", "zero.stage=3", "zero.min_size=1"]
    job = Job(load(words), values=False)
    both, other = job.training.rehearsal, job.others[0][1].training
    assert both.step_s == pytest.approx(both.first_step_s - other.rehearsal.first_step_s / 2)
    for plan in (job.training.plan, other.plan):
        held = {v.name for v in plan.variables.values()}
        assert {"exp_avg/critic.0.weight", "exp_avg/generator.0.weight"} <= held
    homes = [
        {v.name: v.nd_sbp for v in p.variables.values()} for p in (job.training.plan, other.plan)
    ]
    assert homes[0] == homes[1]


REFUSED: dict[str, tuple[object, str, str]] = {
    "no list": (["one"], "updates.0", "is not an update"),
    "no name": ([CRITIC, {**GENERATOR, "name": ""}], "updates.1", "has no name"),
    "unknown key": ([CRITIC, {**GENERATOR, "evry": 2}], "updates.1.evry", "has no key 'evry'"),
    "wrong every": (
        [CRITIC, {**GENERATOR, "every": 0}],
        "updates.1.every",
        "not a number of steps",
    ),
    "first is rare": ([{**CRITIC, "every": 2}], "updates.0.every", "runs with every step"),
    "one name": ([CRITIC, {**GENERATOR, "name": "critic"}], "updates.1.name", "are called"),
    "no parameter": ([{**CRITIC, "parameters": "crtic.*"}], "updates", "matches no parameter"),
    "both train": (
        [CRITIC, {**GENERATOR, "parameters": "*"}],
        "updates",
        "trained by critic and by",
    ),
    "unknown number": (
        [{**CRITIC, "optim": {"lrr": 1}}, GENERATOR],
        "updates.0.optim.lrr",
        "has no key 'lrr'",
    ),
    "no such loss": (
        [CRITIC, {**GENERATOR, "loss": {"_target_": "two_nets.nothing"}}],
        "updates.1.loss._target_",
        "has no 'nothing'",
    ),
    "no such optimizer": (
        [CRITIC, {**GENERATOR, "optim": {"_target_": "two_nets.nothing"}}],
        "updates.1.optim._target_",
        "has no 'nothing'",
    ),
    "a loss that is a vector": (
        [CRITIC, {**GENERATOR, "loss": {"_target_": "two_nets.of_rows"}}],
        "updates.1.loss",
        "shape (16,)",
    ),
}


@pytest.mark.parametrize(("updates", "where", "problem"), REFUSED.values(), ids=REFUSED)
def test_an_update_that_cannot_be_is_refused_at_its_key(
    updates: object, where: str, problem: str, place: Path
) -> None:
    write_recipe(place, updates)
    with pytest.raises(RecipeError) as refused:
        _ = Job(load(["recipe=own.yaml"]), values=False).training
    assert refused.value.where == where and problem in refused.value.problem


def test_what_several_updates_cannot_have_is_named(place: Path) -> None:
    write_recipe(place, GAN)
    with pytest.raises(RecipeError, match=r"combined with auto\.placement=true"):
        load(["recipe=own.yaml", "auto.placement=true"])
