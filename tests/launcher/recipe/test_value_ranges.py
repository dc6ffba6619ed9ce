import math
import shlex
from pathlib import Path

import pytest
from omegaconf import DictConfig

from flowrun.engine.errors import RecipeError
from flowrun.launcher.job.recipe_strategy import inductor_options, strategy_of
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.key_schema import schema
from flowrun.launcher.recipe.recipe_errors import explain
from flowrun.launcher.recipe.value_ranges import ANY, INTEGER, RANGES, Range
from flowrun.launcher.run import plan

# arguments -> (key, what is wrong)
MLP, TP = "recipe=mlp_hybrid", "recipe=gpt_tp"
BUILT = f"{MLP} engine.compiler=inductor engine.inductor"
WRONG = {
    f"{MLP} train.seed=18446744073709551616": ("train.seed", "below 9,22"),
    "recipe=gpt_zero 'recompute.modules=[[0, 1]]'": ("recompute.modules.0", "not a word"),
    f"{MLP} hardware.fp32.flop=[[1],[2]]": ("hardware.fp32.flop.0", "not a number"),
    f"{MLP} hardware.act_s=nan": ("hardware.act_s", "0 or more, not nan"),
    f"{MLP} placement.stages=1000000000000": ("placement.stages", "more than 1,048,576"),
    f"{MLP} 'placement.axes={{data: 1000000, tensor: 1000000}}'": (
        "placement.axes",
        "more than 1,048,576",
    ),
    f"{MLP} 'hardware.levels=[{{name: host, taken: 1}}]'": ("hardware.levels", "no key 'name'"),
    f"{MLP} 'hardware.levels=[{{peer_s: -1}}]'": ("hardware.levels.0.peer_s", "0 or more"),
    f"{MLP} ~data.path": ("~data.path", "nothing to delete"),
    f"{MLP} engine.cuda_graphs=true": ("engine.cuda_graphs", "were removed"),
    f"{MLP} engine.inductor.max_autotune=true": ("engine.inductor", "nothing is built"),
    f"{BUILT}.max_autotun=true": ("engine.inductor.max_autotun", "has no such setting"),
    f"{BUILT}.triton.cudagraphs=true": ("engine.inductor.triton.cudagraphs", "sets it by itself"),
    f"{MLP} optim.lr=inf": ("optim.lr", "at most 1e+38"),
    f"{MLP} optim.lr=1e40": ("optim.lr", "at most 1e+38"),
    f"{TP} optim.clip_norm=inf": ("optim.clip_norm", "at most 1e+38"),
    f"{MLP} hardware.cores=-1": ("hardware.cores", "over 0"),
    f"{TP} 'sbp={{head.weight: {{data: {{tensor: S0}}}}}}'": (
        "sbp.head.weight.data.tensor",
        "nested in the axis 'data'",
    ),
    f"{TP} model._target_=[3]": ("model._target_", "what to build"),
    f"{TP} model.weights=[3]": ("model.weights", "not a path"),
    f"{TP} engine.blocking=[[data]]": ("engine.blocking.0", "not a word"),
    f"{TP} 'task.inputs={{tokens: [3]}}'": ("task.inputs.tokens", "not a word"),
    f"{TP} train.steps=1000000000000000000000": ("train.steps", "at most"),
    f"{TP} optim.groups.head.lr=-1": ("optim.groups.head.lr", "over 0"),
    f"{TP} optim.groups.head.betas=[1]": ("optim.groups.head.betas", "must be two numbers"),
    f"{TP} 'optim.schedule={{name: CosineAnnealingLR, T_max: 0}}'": (
        "optim.schedule",
        "ZeroDivisionError",
    ),
    f"{TP} 'optim.schedule={{name: ExponentialLR, gamma: 1e99}}'": ("optim.schedule", "is inf"),
}


@pytest.mark.parametrize(("arguments", "expected"), WRONG.items(), ids=WRONG)
def test_a_value_that_cannot_be_is_named(arguments: str, expected: tuple[str, str]) -> None:
    given_ = shlex.split(arguments)
    with pytest.raises(RecipeError) as error:
        strategy_of(recipe := load(given_))
        inductor_options(recipe)
    assert error.value.where == expected[0]
    assert expected[1] in error.value.problem
    assert explain(error.value, given_).startswith("command line  ")


def test_a_batch_larger_than_the_data_set_is_refused_before_it_is_read(workplace: Path) -> None:
    from flowrun.launcher.job.job import Job

    with pytest.raises(RecipeError, match="more than the data set") as error:
        Job(load(["recipe=mlp_hybrid", "train.batch_size=2147483640", "launch=virtual"]))
    assert error.value.where == "train.batch_size"


# ---- the table itself ----------------------------------------------------------------------------


def leaves(node: DictConfig, prefix: str = "") -> list[str]:
    """Keys of the schema that hold no further keys."""
    found: list[str] = []
    for key in map(str, node):
        child = node._get_node(key)
        whole = isinstance(child, DictConfig) and len(child)
        found += leaves(child, f"{prefix}{key}.") if whole else [f"{prefix}{key}"]
    return found


def test_every_row_is_of_a_key_that_the_schema_has() -> None:
    known = {*leaves(schema()), "optim.beta1", "optim.beta2"}
    listed = ("hardware.levels.", "hardware.attention.")  # whose entries have keys
    strange = [
        row
        for row in RANGES
        if row.removesuffix(".*").removesuffix(".*") not in known and not row.startswith(listed)
    ]
    assert strange == []


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("[0, 1)", (0, 0.5), (-1e-9, 1, math.nan, math.inf)),
        ("(0, 1]", (1e-9, 1), (0, 1.1, math.nan)),
        ("(0, inf)", (1e-9, 1e300), (0, -1, math.inf, math.nan)),
        ("(0, inf]", (1, math.inf), (0, -math.inf, math.nan)),
        ("[1, 10]", (1, 10), (0, 11)),
    ],
)
def test_an_interval_has_its_ends_where_it_says_so(
    interval: str, inside: tuple[float, ...], outside: tuple[float, ...]
) -> None:
    row = Range(interval)
    assert [row.problem(value) for value in inside] == [""] * len(inside)
    assert all(row.problem(value) for value in outside)
    assert ANY.problem(-1) and INTEGER.problem(2**63)


MEANINGLESS = (
    "launch.hang_s=1e-9 engine.check_capture=1000000007 auto.enabled=7 train.save=1"
    " hardware.device=fp8 optim.weight_decay=1e39 optim.eps=1e39"
)


@pytest.mark.parametrize("override", MEANINGLESS.split())
def test_what_a_run_could_not_mean_is_refused(override: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load(["recipe=mlp_hybrid", override])
    assert refused.value.where == override.partition("=")[0]


@pytest.mark.parametrize("override", ["launch.hang_s=0", "train.save=off", "engine.trace=7"])
def test_what_it_could_mean_is_taken(override: str) -> None:
    load(["recipe=mlp_hybrid", override])


@pytest.mark.parametrize("override", ["log=[nope]", "log=[{}]", "callbacks=[[a]]"])
def test_a_plan_refuses_listeners_that_a_run_refuses(override: str) -> None:
    with pytest.raises(RecipeError):
        plan(load(["recipe=mlp_hybrid", override]))
