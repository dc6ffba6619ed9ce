import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim import lr_scheduler as of_torch

from flowrun.engine.errors import RecipeError
from flowrun.engine.strategy import Optimizer
from flowrun.launcher.job.lr_schedule import Plateau, plateau_of, rates
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.schema import Optim

STEPS, LR = 12, "torch.optim.lr_scheduler"


def by_torch(make: Callable[[SGD], Any], lr: float) -> list[float]:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = make(optimizer)
        found = []
        for step in range(STEPS):
            found.append(scheduler.get_last_lr()[0])
            optimizer.step()
            if step < STEPS - 1:
                scheduler.step()
    return found


def saw(step: int, *, period: int = 4, least: float = 0.0) -> float:
    """A factor that falls from 1 in each period."""
    return least + (1 - least) * (1 - step % period / period)


SAW = {"_target_": f"{__name__}.saw", "period": 3}

# Arguments, which are those of torch's class too.
SCHEDULES: dict[str, dict[str, Any]] = {
    "LinearLR": {"start_factor": 0.1, "total_iters": 4},
    "ConstantLR": {"factor": 0.5, "total_iters": 3},
    "StepLR": {"step_size": 5, "gamma": 0.3},
    "MultiStepLR": {"milestones": [2, 7]},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 8, "eta_min": 0.01},
    "PolynomialLR": {"total_iters": 10, "power": 2.0},
    "CosineAnnealingWarmRestarts": {"T_0": 5},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.5, "step_size_up": 3},
}


def test_every_schedule_of_torch_is_compared_with_its_class() -> None:
    own = {"OneCycleLR", "LambdaLR", "MultiplicativeLR", *NESTED, "ReduceLROnPlateau"}
    kinds = {name for name, kind in vars(of_torch).items() if name[0] != "_" and is_schedule(kind)}
    assert kinds - {"LRScheduler"} == {*SCHEDULES, *own}


def is_schedule(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, of_torch.LRScheduler)


PARTS = [
    {"_target_": f"{LR}.ConstantLR", "factor": 0.1, "total_iters": 3},
    {"_target_": f"{LR}.ExponentialLR", "gamma": 0.9},
]
NESTED: dict[str, dict[str, Any]] = {"SequentialLR": {"milestones": [4]}, "ChainedScheduler": {}}


@pytest.mark.parametrize("name", NESTED)
def test_schedules_inside_a_schedule_are_made_with_it(name: str) -> None:
    given = {"_target_": f"{LR}.{name}", "schedulers": PARTS, **NESTED[name]}

    def make(o: SGD) -> Any:
        parts = [of_torch.ConstantLR(o, 0.1, 3), of_torch.ExponentialLR(o, 0.9)]
        return getattr(of_torch, name)(optimizer=o, schedulers=parts, **NESTED[name])

    assert dict(rates(Optim(lr=0.4, schedule=given), [0.4], STEPS))[0.4] == (*by_torch(make, 0.4),)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_rates_are_those_of_torch_for_every_group(name: str) -> None:
    optim = Optim(lr=0.4, schedule={"name": name, **SCHEDULES[name]})
    found = dict(rates(optim, [0.4, 0.1], STEPS))
    assert set(found) == {0.1, 0.4}
    more = {"cycle_momentum": False} if name == "CyclicLR" else {}
    make = partial(getattr(of_torch, name), **SCHEDULES[name], **more)
    for lr, values in found.items():
        assert values == pytest.approx(by_torch(make, lr), rel=1e-12)


def test_one_cycle_peaks_at_the_learning_rate_and_lasts_the_run() -> None:
    found = dict(rates(Optim(lr=0.4, schedule={"name": "OneCycleLR"}), [0.4], STEPS))
    make = partial(of_torch.OneCycleLR, max_lr=0.4, total_steps=STEPS, cycle_momentum=False)
    assert found[0.4] == pytest.approx(by_torch(make, 0.4), rel=1e-12)


def test_schedules_follow_one_another_as_in_torch() -> None:
    schedule = [
        {"name": "ConstantLR", "factor": 0.25, "total_iters": 9, "steps": 3},
        {"name": "CosineAnnealingLR", "T_max": 9},
    ]
    found = dict(rates(Optim(lr=0.4, schedule=schedule), [0.4], STEPS))

    def make(o: SGD) -> Any:
        parts = [of_torch.ConstantLR(o, 0.25, 9), of_torch.CosineAnnealingLR(o, 9)]
        return of_torch.SequentialLR(o, parts, [3])

    assert found[0.4] == pytest.approx(by_torch(make, 0.4), rel=1e-12)


def halved(step: int) -> torch.Tensor:
    return torch.tensor(0.5) ** step


def test_a_factor_may_be_a_tensor() -> None:
    optim = Optim(lr=0.4, schedule={"_target_": f"{__name__}.halved"})
    assert dict(rates(optim, [0.4], 3))[0.4] == pytest.approx((0.4, 0.2, 0.1))


def test_warm_up_rises_in_equal_steps_to_the_rate() -> None:
    found = dict(rates(Optim(lr=0.4, warmup_steps=4), [0.4], 6))
    assert found[0.4] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_a_cosine_behind_a_warm_up_lasts_what_is_left() -> None:
    optim = Optim(lr=0.4, warmup_steps=4, schedule={"name": "CosineAnnealingLR"})
    found = dict(rates(optim, [0.4], STEPS))[0.4]
    cosine = by_torch(partial(of_torch.CosineAnnealingLR, T_max=STEPS - 4), 0.4)
    assert found[:4] == pytest.approx((0.1, 0.2, 0.3, 0.4))
    assert found[4:] == pytest.approx(cosine[: STEPS - 4])


def test_without_a_schedule_there_is_nothing_to_foresee() -> None:
    assert rates(Optim(lr=0.4), [0.4], STEPS) == ()


@pytest.mark.parametrize(
    ("schedule", "where", "problem"),
    [
        ({"T_max": 3}, "optim.schedule", "nothing names"),
        ({"name": "CosineLR"}, "optim.schedule.name", "no schedule 'CosineLR'"),
        (
            [{"name": "ReduceLROnPlateau", "steps": 3}, {"name": "LinearLR"}],
            "optim.schedule.0.name",
            "follows evaluations",
        ),
        (
            {**PARTS[0], "_target_": f"{LR}.ChainedScheduler", "schedulers": PARTS},
            "optim.schedule.factor",
            "takes no argument",
        ),
        (
            {"_target_": f"{LR}.ChainedScheduler", "schedulers": [{"name": "ReduceLROnPlateau"}]},
            "optim.schedule",
            "does not support",
        ),
        ({**SAW, "perod": 3}, "optim.schedule.perod", "takes no argument"),
        ({"_target_": f"{__name__}.swa"}, "optim.schedule._target_", "has no 'swa'"),
        ({**SAW, "name": "LinearLR"}, "optim.schedule", "nothing names"),
        ({"name": "StepLR"}, "optim.schedule", "needs the argument 'step_size'"),
        ({"name": "StepLR", "stepsize": 3}, "optim.schedule.stepsize", "takes no argument"),
        ({"name": "LinearLR", "start_factor": 7.0}, "optim.schedule", "refused its arguments"),
        (
            [{"name": "LinearLR"}, {"name": "StepLR", "step_size": 3}],
            "optim.schedule.0.steps",
            "how long LinearLR lasts",
        ),
        (
            [{"name": "LinearLR", "steps": 3}, {"name": "OneCycleLR"}],
            "optim.schedule.1.name",
            "follows no other",
        ),
        (
            {"name": "OneCycleLR", "cycle_momentum": True},
            "optim.schedule.cycle_momentum",
            "only the learning rate",
        ),
        ({"name": "OneCycleLR", "total_steps": 5}, "optim.schedule", "no rate of step"),
    ],
)
def test_a_wrong_schedule_is_a_located_error(schedule: Any, where: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem) as error:
        rates(Optim(lr=0.4, schedule=schedule), [0.4], STEPS)
    assert error.value.where == where


# ---- functions, and classes by their path --------------------------------------------------------


FUNCTION_KEYS: dict[str, Any] = {
    "a function": SAW,
    "LambdaLR by its name": {"name": "LambdaLR", "lr_lambda": SAW},
    "LambdaLR by its path": {"_target_": "torch.optim.lr_scheduler.LambdaLR", "lr_lambda": SAW},
}


@pytest.fixture
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


@pytest.mark.parametrize("schedule", FUNCTION_KEYS.values(), ids=FUNCTION_KEYS)
def test_a_function_gives_the_factor_of_each_step(schedule: dict[str, Any]) -> None:
    found = dict(rates(Optim(lr=0.4, schedule=schedule), [0.4, 0.1], STEPS))
    for lr, values in found.items():
        assert list(values) == [lr * saw(step, period=3) for step in range(STEPS)]


def test_a_function_follows_a_warm_up_and_another_schedule() -> None:
    constant = {"name": "ConstantLR", "factor": 0.5, "total_iters": 9, "steps": 3}
    asked = Optim(lr=0.4, warmup_steps=2, schedule=[constant, SAW])
    found = dict(rates(asked, [0.4], STEPS))[0.4]
    expected = [0.2, 0.4, 0.2, 0.2, 0.2, *(0.4 * saw(step, period=3) for step in range(STEPS - 5))]
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", [*SCHEDULES, "OneCycleLR"])
def test_a_class_by_its_path_is_the_class_of_its_name(name: str) -> None:
    given = SCHEDULES.get(name, {})
    path = {"_target_": f"torch.optim.lr_scheduler.{name}", **given}
    one, other = (
        rates(Optim(lr=0.4, schedule=each), [0.4], STEPS)
        for each in (path, {"name": name, **given})
    )
    assert one == other


# ---- rates that wait for evaluations -------------------------------------------------------------

LOSSES = [3.0, 2.0, 2.1, 2.2, 1.9, float("nan"), 2.5, 1.95]
PLATEAU = {"factor": 0.3, "patience": 1, "cooldown": 1, "min_lr": 0.02}


def plateau(every: int = 1, **given: Any) -> tuple[Plateau, Optimizer]:
    schedule = {"_target_": f"{LR}.ReduceLROnPlateau", **PLATEAU, **given}
    keys = ["recipe=mlp_hybrid", "eval.every=2", "optim.lr=0.4"]
    recipe = load([*keys, f"optim.schedule={schedule}".replace("'", "")])
    optimizer = Optimizer("sgd", (("lr", 0.4),), rates=rates(recipe.optim, [0.4, 0.1], STEPS))
    found = plateau_of(recipe, optimizer, every)
    assert found
    return found, optimizer


def of_class(lr: float) -> list[float]:
    """torch's rate after each of LOSSES."""
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = of_torch.ReduceLROnPlateau(optimizer, **PLATEAU)
    found = []
    for loss in LOSSES:
        scheduler.step(loss)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_rates_follow_evaluations_as_in_torch_for_every_group() -> None:
    follows, optimizer = plateau()
    for k, loss in enumerate(LOSSES):
        follows.take(2 * (k + 1), loss)
    for lr in (0.4, 0.1):
        field = optimizer.rate_field(lr)
        assert [follows.adjust(field, lr, step) for step in (0, 1)] == [lr, lr]
        found = [follows.adjust(field, lr, step) for step in range(2, 18, 2)]
        assert found == of_class(lr) == [follows.adjust(field, lr, s) for s in range(3, 19, 2)]
        assert follows.adjust(field, lr / 2, 17) == pytest.approx(found[-1] / 2)  # in a warm-up
    assert len({*of_class(0.4)}) > 2 and follows.adjust("@tangent", 5.0, 17) == 5.0


def test_an_evaluation_that_comes_again_replaces_it_and_all_later_ones() -> None:
    (follows, _), (again, _) = plateau(), plateau()
    for losses in ([*LOSSES[:2], 9.0, 9.0, 9.0], LOSSES):
        for k, loss in enumerate(losses):
            again.take(2 * (k + 1), loss)
    for k, loss in enumerate(LOSSES):
        follows.take(2 * (k + 1), loss)
    found = [[p.adjust("@lr", 0.4, step) for step in range(17)] for p in (follows, again)]
    assert found[0] == found[1]


def test_an_update_that_runs_more_seldom_counts_its_own() -> None:
    (each, _), (third, _) = plateau(), plateau(every=3)
    for follows in (each, third):
        for k, loss in enumerate(LOSSES):
            follows.take(2 * (k + 1), loss)
    found = [third.adjust("@lr", 0.4, number) for number in range(5)]
    assert found == [each.adjust("@lr", 0.4, 3 * number) for number in range(5)]


@pytest.mark.parametrize(
    ("keys", "where", "problem"),
    [
        (["eval.every=0"], "optim.schedule", "there are none before the end"),
        (["eval.batches=0"], "optim.schedule", "there are none before the end"),
        (["+optim.schedule.metric=f2"], "optim.schedule.metric", "f2 is not a result"),
        (["+optim.schedule.factr=2"], "optim.schedule.factr", "takes no argument"),
        (["+optim.schedule.factor=2"], "optim.schedule", "Factor should be"),
    ],
)
def test_a_wrong_plateau_is_a_located_error(keys: list[str], where: str, problem: str) -> None:
    given = ["recipe=mlp_hybrid", "eval.every=2", "optim.schedule={name: ReduceLROnPlateau}"]
    recipe = load([*given, *keys])
    with pytest.raises(RecipeError, match=problem) as error:
        plateau_of(recipe, Optimizer(rates=rates(recipe.optim, [0.4], STEPS)))
    assert error.value.where == where
