from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flowrun.engine.capture.capture import Task, capture
from flowrun.engine.capture.module_checks import overlap, refuse_foreign
from flowrun.engine.errors import RecipeError

Change = Callable[[Any], Any]
Forward = Callable[[Any, Any], Any]


def through(model: Any, x: Any) -> Any:
    return model["b"](model["a"](x))


def net() -> Any:
    return nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})


def capture_changed(change: Change = id, forward: Forward = through) -> Any:
    model = net()
    change(model)
    model.forward = lambda x: forward(model, x)
    loss: Any = lambda output, batch: output.mean()  # noqa: E731
    return capture(Task(model, {"x": "x"}, loss), {"x": torch.ones(3, 4)})


def shared(name: str, make: Change) -> Change:
    """Give module b a parameter made of the weight of a."""
    return lambda model: setattr(model["b"], name, nn.Parameter(make(model["a"].weight.detach())))


SHARE = "parameter a.weight and parameter b.{} share memory"
REFUSED: dict[str, tuple[Change, str]] = {
    "tied by data": (
        lambda model: setattr(model["b"].weight, "data", model["a"].weight.data),
        SHARE.format("weight"),
    ),
    "turned": (shared("weight", torch.t), SHARE.format("weight")),
    "a part": (shared("bias", lambda weight: weight[1]), SHARE.format("bias")),
    "strided": (
        shared("weight", lambda weight: weight.as_strided((2, 4), (4, 1), 4)),
        SHARE.format("weight"),
    ),
    "a buffer": (
        lambda model: model["b"].register_buffer("table", model["a"].weight.data[:2]),
        "parameter a.weight and buffer b.table share memory",
    ),
    "a hook of backward": (
        lambda model: model["b"].register_full_backward_hook(lambda *given: None),
        r"module b has a hook on its backward \(test_module_",
    ),
    "a hook before backward": (
        lambda model: model["b"].register_full_backward_pre_hook(lambda *given: None),
        r"module b has a hook on its backward \(test_module_",
    ),
    "a hook after accumulation": (
        lambda model: model["a"].weight.register_post_accumulate_grad_hook(lambda p: None),
        r"a\.weight has a hook of register_post_accumulate",
    ),
    "a lazy module": (
        lambda model: model.update({"b": nn.LazyLinear(4)}),
        r"b\.weight has no shape yet",
    ),
    "a frozen model": (lambda model: model.requires_grad_(False), "All parameters are frozen"),
}


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_cannot_be_captured_is_refused_by_name(change: Change, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        capture_changed(change)


def test_pieces_of_one_flat_tensor_that_do_not_overlap_are_welcome() -> None:
    def flat(model: Any) -> None:
        whole = torch.randn(32)
        model["a"].weight = nn.Parameter(whole[:16].view(4, 4))
        model["b"].weight = nn.Parameter(whole[16:].view(4, 4))

    assert "grad/a.weight" in dict(capture_changed(flat).results)


def test_columns_of_one_matrix_do_not_overlap() -> None:
    whole = torch.zeros(4, 6)
    assert not overlap(whole[:, :3], whole[:, 3:])
    assert overlap(whole[:, :3], whole[:, 2:])
    assert overlap(whole, whole.t())


def test_hooks_of_forward_are_followed() -> None:
    def hooked(model: Any) -> None:
        model["a"].register_forward_hook(lambda module, given, made: made * 2)
        model["b"].register_forward_pre_hook(lambda module, given: (given[0] + 1,))

    graph = capture_changed(hooked)
    assert [op.target for op in graph.ops if op.phase == "forward"].count("aten.mul.Tensor") == 1


def test_what_torch_has_divided_is_refused_by_name() -> None:
    class FullyShardedDataParallel(nn.Module):
        pass

    with pytest.raises(RecipeError, match="module c is divided over ranks by torch") as error:
        capture_changed(lambda model: model.update({"c": FullyShardedDataParallel()}))
    assert "placement.axes" in error.value.instead


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_without_training_is_refused() -> None:
    exported = torch.export.export(nn.Linear(4, 4), (torch.ones(3, 4),)).module()
    with pytest.raises(RecipeError, match="has no training mode") as error:
        refuse_foreign(exported)
    assert "not what torch.export made of it" in error.value.instead


# ---- nothing to train ----------------------------------------------------------------------------


def without_gradients(model: Any, x: Any) -> Any:
    with torch.no_grad():
        return model["b"](model["a"](x))


UNREACHED: dict[str, Forward] = {
    "detached": lambda model, x: model["b"](model["a"](x)).detach(),
    "without gradients": without_gradients,
    "chosen": lambda model, x: model["b"](x).argmax(-1).float(),
}


@pytest.mark.parametrize("forward", UNREACHED.values(), ids=UNREACHED)
def test_a_loss_that_no_parameter_reaches_is_refused_in_torchs_words(forward: Forward) -> None:
    with pytest.raises(RecipeError, match="element 0 of tensors does not require grad") as error:
        capture_changed(forward=forward)
    assert error.value.where == "task.loss"


def test_parameters_without_a_gradient_are_noted() -> None:
    graph = capture_changed(forward=lambda model, x: model["b"](x))
    assert graph.notes == ("2 of 4 parameters get no gradient and stay: a.weight, a.bias",)
