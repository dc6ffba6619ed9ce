from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flowrun.engine.capture.capture import Task, capture
from flowrun.engine.capture.module_checks import overlap
from flowrun.engine.errors import RecipeError


def net() -> Any:
    return nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})


def tied_by_data(model: Any) -> None:
    model["b"].weight.data = model["a"].weight.data


def turned(model: Any) -> None:
    model["b"].weight = nn.Parameter(model["a"].weight.detach().t())


def a_part(model: Any) -> None:
    model["b"].bias = nn.Parameter(model["a"].weight.detach()[1])


def strided(model: Any) -> None:
    model["b"].weight = nn.Parameter(model["a"].weight.detach().as_strided((2, 4), (4, 1), 4))


def a_buffer(model: Any) -> None:
    model["b"].register_buffer("table", model["a"].weight.data[:2])


def capture_changed(change: Callable[[Any], None]) -> Any:
    model = net()
    change(model)
    model.forward = lambda x: model["b"](model["a"](x))
    loss: Any = lambda output, batch: output.mean()  # noqa: E731
    return capture(Task(model, {"x": "x"}, loss), {"x": torch.ones(3, 4)})


@pytest.mark.parametrize(
    ("change", "other"),
    [
        (tied_by_data, "parameter b.weight"),
        (turned, "parameter b.weight"),
        (a_part, "parameter b.bias"),
        (strided, "parameter b.weight"),
        (a_buffer, "buffer b.table"),
    ],
)
def test_parameters_that_share_memory_are_refused_by_both_names(
    change: Callable[[Any], None], other: str
) -> None:
    with pytest.raises(RecipeError, match=f"parameter a.weight and {other} share memory"):
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


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_hook_on_a_modules_backward_is_refused_by_name(kind: str) -> None:
    with pytest.raises(RecipeError, match=r"module b has a hook on its backward \(test_module_"):
        capture_changed(lambda model: getattr(model["b"], kind)(lambda *given: None))


def test_a_hook_after_accumulation_is_refused_by_name() -> None:
    def hooked(model: Any) -> None:
        model["a"].weight.register_post_accumulate_grad_hook(lambda p: None)

    with pytest.raises(RecipeError, match=r"a\.weight has a hook of register_post_accumulate"):
        capture_changed(hooked)


def test_a_lazy_module_is_refused_by_the_parameter_that_has_no_shape() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    loss: Any = lambda output, batch: output.mean()  # noqa: E731
    with pytest.raises(RecipeError, match=r"0\.weight has no shape yet"):
        capture(Task(model, {"input": "x"}, loss), {"x": torch.ones(3, 4)})


def test_hooks_of_forward_are_followed() -> None:
    def hooked(model: Any) -> None:
        model["a"].register_forward_hook(lambda module, given, made: made * 2)
        model["b"].register_forward_pre_hook(lambda module, given: (given[0] + 1,))

    graph = capture_changed(hooked)
    assert [op.target for op in graph.ops if op.phase == "forward"].count("aten.mul.Tensor") == 1


# ---- nothing to train ----------------------------------------------------------------------------


def detached(model: Any, x: Any) -> Any:
    return model["b"](model["a"](x)).detach()


def without_gradients(model: Any, x: Any) -> Any:
    with torch.no_grad():
        return model["b"](model["a"](x))


def chosen(model: Any, x: Any) -> Any:
    return model["b"](x).argmax(-1).float()


def frozen(model: Any, x: Any) -> Any:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model["b"](x)


@pytest.mark.parametrize("forward", [detached, without_gradients, chosen])
def test_a_loss_that_no_parameter_reaches_is_refused_in_torchs_words(
    forward: Callable[[Any, Any], Any],
) -> None:
    with pytest.raises(RecipeError, match="element 0 of tensors does not require grad") as error:
        capture_changed_forward(forward)
    assert error.value.where == "task.loss"


def test_a_model_that_is_frozen_whole_is_refused() -> None:
    def freeze(model: Any) -> None:
        model.requires_grad_(False)

    with pytest.raises(RecipeError, match="All parameters are frozen"):
        capture_changed(freeze)


def capture_changed_forward(forward: Callable[[Any, Any], Any]) -> Any:
    model = net()
    model.forward = lambda x: forward(model, x)
    loss: Any = lambda output, batch: output.mean()  # noqa: E731
    return capture(Task(model, {"x": "x"}, loss), {"x": torch.ones(3, 4)})


def test_parameters_without_a_gradient_are_noted() -> None:
    graph = capture_changed_forward(lambda model, x: model["b"](x))
    assert graph.notes == ("2 of 4 parameters get no gradient and stay: a.weight, a.bias",)
