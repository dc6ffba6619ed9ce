from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flowrun.engine.errors import RecipeError
from flowrun.launcher.data.sampler import Sampler
from flowrun.launcher.data.stacked import Rows
from flowrun.launcher.model.dataset_checks import check_items, check_labels, check_vocabulary
from support.nets.small_llama import small_llama

X = torch.arange(40.0).view(20, 2)


class Mine(Dataset[dict[str, Tensor]]):
    """{x (2,) float32}; called: how often an item was made alone."""

    def __init__(self) -> None:
        self.called = 0

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.called += 1
        return {"x": X[index]}


def with_method(name: str, made: Callable[[Any], Any]) -> Mine:
    kind = type("Mine", (Mine,), {name: lambda self, indices: made(indices)})
    return kind()


def sampler(data: Mine) -> Sampler:
    return Sampler(data=data, seed=3, batch_size=8, micro_batches=2, held_out=4)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("stacked", lambda indices: {"x": X.T[:, indices].T}),  # not contiguous
        ("__getitems__", lambda indices: [{"x": X[index]} for index in indices]),
    ],
    ids=["stacked", "getitems"],
)
def test_samples_are_made_many_at_once(name: str, made: Callable[[Any], Any]) -> None:
    data, alone = with_method(name, made), sampler(Mine())
    check_items(data)
    data.called = 0
    for step, micro_batch in ((0, 0), (0, 1), (7, 1)):
        found = sampler(data)(step, micro_batch, slice(1, 4))["x"]
        assert torch.equal(found, alone(step, micro_batch, slice(1, 4))["x"])
        assert found.is_contiguous()
    assert data.called == 0


def test_a_tensor_that_is_kept_under_that_name_is_no_method() -> None:
    data = Mine()
    data.stacked = X  # type: ignore[attr-defined]
    check_items(data)
    assert sampler(data)(0, 0, slice(0, 4))["x"].shape == (4, 2)


def test_micro_batches_and_rows_are_parts_of_one_step() -> None:
    pieces = sampler(Mine())
    whole = torch.cat([pieces(2, k, slice(0, 4))["x"] for k in range(2)])
    parts = [pieces(2, k, slice(a, a + 2))["x"] for k in range(2) for a in (0, 2)]
    assert torch.equal(torch.cat(parts), whole) and len(set(whole[:, 0].tolist())) == 8


WRONG: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "too few rows": (
        "stacked",
        lambda indices: {"x": X[indices[:1]]},
        "Mine.stacked, given the indices 0 and 1, makes 'x' of shape (1, 2) and torch.float32; "
        "two items make shape (2, 2) and torch.float32.",
    ),
    "another dtype": ("stacked", lambda indices: {"x": X[indices].long()}, "torch.int64; two"),
    "other fields": (
        "stacked",
        lambda indices: {"y": X[indices]},
        "makes the fields y; items have x.",
    ),
    "a list": ("stacked", lambda indices: [X[indices]], "makes a list, not a dict of tensors."),
    "a failure": ("stacked", lambda indices: X[indices + 99], "failed: IndexError: "),
    "too few items": (
        "__getitems__",
        lambda indices: [{"x": X[0]}],
        "Mine.__getitems__, given the indices 0 and 1, makes 'x' of shape (1, 2)",
    ),
    "no items": ("__getitems__", lambda indices: X[indices], "Mine.__getitems__, given"),
}


@pytest.mark.parametrize(("name", "made", "fact"), WRONG.values(), ids=WRONG)
def test_a_wrong_method_is_told_apart_at_once(
    name: str, made: Callable[[Any], Any], fact: str
) -> None:
    with pytest.raises(RecipeError) as error:
        check_items(with_method(name, made))
    assert "data._target_" in str(error.value) and fact in str(error.value)
    assert "It returns" in str(error.value)


ALONE: dict[str, tuple[dict[str, str], str]] = {
    "another value": ({"x": "next"}, "makes tensor([2., 3.]); the item's 'x' is tensor([0., 1.])."),
    "no such field": ({"y": "next"}, "the item's 'y' is None."),
    "no such method": ({"x": "none"}, "failed: AttributeError: "),
}


@pytest.mark.parametrize(("unprepared", "fact"), ALONE.values(), ids=ALONE)
def test_a_field_made_alone_is_the_item_s(unprepared: dict[str, str], fact: str) -> None:
    data = with_method("next", lambda index: X[index + 1])
    data.unprepared = unprepared  # type: ignore[attr-defined]
    with pytest.raises(RecipeError) as error:
        check_items(data)
    assert fact in str(error.value) and "which `unprepared` names" in str(error.value)


TOKENS = torch.arange(24).view(3, 8)
AHEAD = TOKENS + 1
MASKED = torch.where(torch.arange(8) < 4, -100, AHEAD)
MODEL_LOSS = {"_target_": "flowrun.models.losses.model_loss"}
LLAMA = small_llama(vocab_size=32)


@pytest.mark.parametrize(
    ("targets", "labels", "loss", "problem"),
    [
        (MASKED, "tokens", None, "'tokens' counts every id, also those that the field 'targets'"),
        (
            MASKED,
            "targets",
            None,
            "'targets' is one id ahead of 'tokens' already, and LlamaForCausalLM",
        ),
        (AHEAD, "targets", MODEL_LOSS, "it would learn the id after the next"),
    ],
)
def test_labels_that_train_on_something_else_are_refused(
    targets: Tensor, labels: str, loss: Any, problem: str
) -> None:
    data = Rows(tokens=TOKENS, targets=targets)
    with pytest.raises(RecipeError, match=problem) as refused:
        check_labels(LLAMA, {"input_ids": "tokens", "labels": labels}, loss, data)
    assert refused.value.where == "task.inputs.labels"
    assert "task.inputs={input_ids: tokens}" in str(refused.value)


def test_labels_that_are_the_ids_are_fine() -> None:
    inputs = {"input_ids": "tokens", "labels": "tokens"}
    check_labels(LLAMA, inputs, None, Rows(tokens=TOKENS, targets=AHEAD))
    check_labels(LLAMA, {**inputs, "labels": "own"}, None, Rows(tokens=TOKENS, own=TOKENS))
    check_labels(LLAMA, inputs, {"_target_": "x"}, Rows(tokens=TOKENS, targets=MASKED))
    check_labels(torch.nn.Identity(), {**inputs, "labels": "to"}, None, Rows(tokens=X, to=X + 1))


def check(keys: dict[str, Any], ids: Any, model: Any = None) -> None:
    made, data = model or nn.Identity(), SimpleNamespace(vocabulary=ids)
    check_vocabulary({"_target_": "m", **keys}, made, data, "bpe/")


def test_enough_ids_or_none_at_all_are_fine() -> None:
    check({"vocabulary": 320}, 320)
    check({"vocabulary": 512}, 320)
    check({"width": 3}, 320)
    check({"vocabulary": 4}, None)
    check_vocabulary({"_target_": "m"}, nn.Identity(), object(), None)


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"vocabulary": 256}, "model.vocabulary"),
        ({"config": {"vocab_size": 256}}, "model.config.vocab_size"),
    ],
)
def test_too_few_ids_are_refused_with_the_number_to_write(keys: Any, where: str) -> None:
    with pytest.raises(RecipeError) as refused:
        check(keys, 8192)
    assert refused.value.where == where
    assert "the tokenizer bpe/ of data.tokenizer has 8,192 ids" in str(refused.value)
    assert f"Write {where}=8192" in str(refused.value)


def test_a_config_of_transformers_counts_too() -> None:
    model = nn.Identity()
    model.config = SimpleNamespace(vocab_size=100)  # type: ignore[assignment]
    with pytest.raises(RecipeError, match="a row for 100 of them"):
        check({}, 320, model)
