"""Lines that cannot be captured, each in several models: the refusal names the line, in words for
who did not write torch, and what to write.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flowrun.engine.capture.capture import Task, capture
from flowrun.engine.errors import RecipeError
from support.checks import refused
from support.checks.refused import Mutation, Part

NEVER = (
    *("Traceback", "a bug in flowrun", "FakeTensor", "fake tensor", "VariableTracker", "proxy"),
    *("AOT", "nbacked", "guard on", "unhinted", "Observed exception", "Dynamo developers"),
    *("_local_scalar", "INTERNAL", "<unknown", "polyfill", "'list'", "capture.py"),
)
FILE = "tests/support/checks/refused.py"
VALUE = ("asks for the value of a tensor", "Compute with tensors")
SHAPE = ("depends on values", "Keep the shape")
DRAW = ("", "Draw with torch")
OUTSIDE = ("it calls", "Call it before training")
LAYER = ("", "in __init__, and call them here")
SEED = ("", "train.seed")
ELSE = ("", "Write that part with tensors")


def plain(error: str) -> tuple[str, str]:
    return f"fails in plain torch, too: {error}", "Mend it there"


# kind -> functions of refused.py
KINDS = {
    VALUE: "branches tries loops counts item floats lists makes_tensor hashes equal allclose"
    " contains boolean steps_range arange checkpoints custom math_call formats reprs pointer"
    " storage",
    SHAPE: "repeats picks nonzero unique wheres masked bincount",
    DRAW: "numpy_random python_random python_randint python_shuffle python_choice"
    " python_generator python_sample uuids",
    OUTSIDE: "clock now ids reads_file opens runs frames saves scripts",
    LAYER: "makes_layer adds_module assigns_weight moves copies",
    SEED: "seeds forks generates",
    ELSE: "sparse nested",
}
# function -> words of the problem, and of what to write
ANYWHERE = {
    **{name: words for words, names in KINDS.items() for name in names.split()},
    "one_hot": ("asks for the value", "num_classes"),
    "freezes": ("forward sets requires_grad", "Freeze it in __init__"),
    "iterates": ("other values of Python in its second call", "Count in a buffer"),
    "asserts_shape": plain("AssertionError: 17 features"),
    "shapes": plain("RuntimeError: m"),
    "indexes": plain("RuntimeError: Expected tensor for argument #1 'indices'"),
    "out_of_range": plain("IndexError: index 7"),
    "missing_attribute": plain("AttributeError: 'Part' object has no attribute 'lyer'"),
    "missing_argument": plain("TypeError: Linear.forward() missing"),
    "too_many": plain("TypeError: Linear.forward() takes 2"),
    "list_argument": plain("TypeError: linear(): argument"),
    "keyword": plain("TypeError: relu() got an unexpected keyword argument 'inplce'"),
    "name": plain("NameError: name 'hh'"),
    "key": plain("KeyError: 3"),
    "divides": plain("ZeroDivisionError"),
    "raises": plain("ValueError: expected 17 features, got 4"),
    "raises_own": plain("OwnError: mine"),
    "recurses": plain("RecursionError"),
    "none_plus": plain("TypeError: unsupported operand"),
    "unpacks": plain("ValueError: too many values"),
    "device": plain("RuntimeError: Tensor on device meta"),
    "not_implemented": plain("NotImplementedError"),
    "stops": plain("StopIteration"),
    "imports": plain("ModuleNotFoundError: No module named 'not_there'"),
    "grad_of": plain("TypeError: unsupported operand"),
}
IN_A_MODEL = {
    "registers": ("forward registers or removes `late`", "in __init__"),
    "keeps": ("forward keeps tensors in `items`", "Register the tensor as a buffer"),
    "adds_to_plain": ("a tensor that is not a buffer", "register_buffer"),
    "writes_data": ("replaces the .data of a tensor", "Write into a buffer"),
    "writes_weight": ("forward writes into the parameter", "Compute with a changed copy"),
    "writes_leaf": plain("RuntimeError: a leaf Variable that requires grad"),
    "backwards": ("forward takes the gradient of what it returns", "Leave backward() out"),
}
RETURNED = {
    "yields": "a generator",
    "text": "a str",
    "number": "a float",
    "tuples": "a tuple {float32 (3, 4), float32 (3, 4)}",
    "mapping": "a dict {logits: float32 (3, 4)}",
    "module": "a Part",
    "function": "a function",
    "nothing": "None",
    "integer": "int64 (3,)",
    "boolean_tensor": "bool (3, 4)",
}


def mean(output: Any, batch: Any) -> Any:
    return output.mean()


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


def alone(mutation: Mutation) -> Task:
    return Task(Part(mutation), {"h": "x"}, mean)


def in_blocks(mutation: Mutation) -> Task:
    return Task(nn.Sequential(*(Part(mutation) for _ in range(3))), {"input": "x"}, mean)


def in_the_loss(mutation: Mutation) -> Task:
    part = Part(mutation)
    return Task(nn.Linear(4, 4), {"input": "x"}, lambda output, _: mutation(part, output).mean())


def refusal_of(task: Task) -> RecipeError:
    with pytest.raises(RecipeError) as error:
        capture(task, {"x": torch.ones(3, 4)})
    said = str(error.value)
    assert not [word for word in NEVER if word in said], said
    return error.value


def line_of(mutation: Mutation) -> int:
    """Return the line that is refused."""
    lines, first = inspect.getsourcelines(mutation)
    return first + next((k for k, line in enumerate(lines) if "# here" in line), 1)


@pytest.mark.parametrize("model", [alone, in_blocks, in_the_loss])
@pytest.mark.parametrize("name", ANYWHERE)
def test_a_line_that_cannot_be_captured_is_named(
    name: str, model: Callable[[Mutation], Task]
) -> None:
    mutation = getattr(refused, name)
    error = refusal_of(model(mutation))
    problem, instead = ANYWHERE[name]
    if name != "recurses":
        assert f"{FILE}:{line_of(mutation)} in " in error.problem
    assert problem in error.problem
    assert instead in error.instead


@pytest.mark.parametrize("name", IN_A_MODEL)
def test_what_a_model_does_to_its_state_is_named(name: str) -> None:
    mutation = getattr(refused, name)
    error = refusal_of(alone(mutation))
    problem, instead = IN_A_MODEL[name]
    assert f"refused.py:{line_of(mutation)}" in error.problem
    assert problem in error.problem
    assert instead in error.instead


@pytest.mark.parametrize("name", RETURNED)
def test_a_loss_that_cannot_take_an_output_says_what_the_model_returns(name: str) -> None:
    error = refusal_of(alone(getattr(refused, name)))
    assert error.where == "task.loss"
    assert f"{Path(__file__).name}:{inspect.getsourcelines(mean)[1] + 1} in mean" in error.problem
    assert f"The model returns {RETURNED[name]}." in error.problem
