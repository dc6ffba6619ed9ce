import itertools
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from flowrun.engine.capture.capture import Task, capture, capture_evaluation
from flowrun.engine.errors import RecipeError

NEVER = ("AOTInput", "AOTOutput", "INTERNAL ASSERT", "Observed exception", "Traceback")
Forward = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """A layer, and a forward of any kind."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.made = nn.Linear(4, 3), forward
        self.count, self.plain = itertools.cycle([1, 2]), torch.zeros(4)
        self.register_buffer("running", torch.zeros(4))
        self.rnn = nn.GRU(3, 3)
        self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(3, 3, [1], div_value=1.0)

    def forward(self, x: Tensor) -> Any:
        return self.made(self, x)


def mean(output: Tensor, batch: Any) -> Tensor:
    return output.mean()


def refusal(forward: Forward, loss: Any = mean) -> RecipeError:
    with pytest.raises(RecipeError) as error:
        capture(Task(Net(forward), {"x": "x"}, loss), {"x": torch.ones(3, 4)})
    assert not [word for word in NEVER if word in str(error.value)]
    return error.value


def raises(net: Any, x: Tensor) -> Tensor:
    raise ValueError(f"expected 17 features, got {x.shape[1]}")


MISTAKES: dict[str, Forward] = {
    "mat1 and mat2 shapes cannot be multiplied (3x4 and 3x4)": (lambda net, x: x @ net.a.weight),
    "AttributeError: 'Net' object has no attribute 'b'": lambda net, x: net.b(x),
    "ValueError: expected 17 features, got 4": raises,
}


@pytest.mark.parametrize(("said", "forward"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_reported_with_the_users_line(said: str, forward: Forward) -> None:
    error = refusal(forward)
    assert error.where == "model"
    line = forward.__code__.co_firstlineno + (forward is raises)
    assert f"{said} (tests/engine/capture/test_capture_errors.py:{line} in" in error.problem


def test_a_mistake_of_the_loss_is_reported_at_its_key() -> None:
    error = refusal(lambda net, x: net.a(x), lambda output, batch: (output - batch["x"]).mean())
    assert error.where == "task.loss"
    assert "must match" in error.problem


def test_a_mistake_of_a_metric_is_reported_at_its_key() -> None:
    def wrong(output: Tensor, batch: Any) -> Tensor:
        return output.nothing  # type: ignore[attr-defined,no-any-return]

    task = Task(Net(lambda net, x: net.a(x)), {"x": "x"}, mean, {"wrong": wrong})
    with pytest.raises(RecipeError, match="no attribute 'nothing'") as error:
        capture_evaluation(task, {"x": torch.ones(3, 4)})
    assert error.value.where == "task.metrics"


def test_a_mask_that_transformers_draws_by_numpy_is_named_with_its_switch() -> None:
    layers: dict[str, Any] = {"conv_dim": (8,), "conv_stride": (4,), "conv_kernel": (8,)}
    groups = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    sizes = {"vocab_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    augmented = Wav2Vec2Config(
        **layers, **groups, **sizes, intermediate_size=16, mask_time_length=2
    )
    batch = {"input_values": torch.randn(2, 80), "labels": torch.ones(2, 2, dtype=torch.long)}
    with pytest.raises(RecipeError, match=r"in _compute_mask_indices: .*numpy.random") as error:
        capture(Task(Wav2Vec2ForCTC(augmented), {name: name for name in batch}), batch)
    assert "apply_spec_augment" in error.value.instead


def test_loops_that_torch_geometric_takes_out_are_named_with_its_switch(tmp_path: Path) -> None:
    file = tmp_path / "site-packages/torch_geometric/utils/loop.py"
    file.parent.mkdir(parents=True)
    file.write_text("def remove_self_loops(edges):\n    return edges[:, edges[0] != edges[1]]\n")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    error = refusal(lambda net, x: net.a(x) + names["remove_self_loops"](x.long()).sum())
    assert "in remove_self_loops: return edges" in error.problem
    assert "add_self_loops=False" in error.instead


def writes_data(net: Any, x: Tensor) -> Any:
    net.running.data = x.mean(0)
    return net.a(x + net.running)


def picks(net: Any, x: Tensor) -> Any:
    return net.a(x) + x[x > 0].mean()


def assigns(net: Any, x: Tensor) -> Any:
    y = net.a(x) * 1.0
    y[y < 0] = y[y < 0].tanh()
    return y


def reads_gradients(net: Any, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    net.a(x).sum().backward(inputs=[x])
    return net.a(x.grad)


def packs(net: Any, x: Tensor) -> Any:
    packed = nn.utils.rnn.pack_padded_sequence(net.a(x).unsqueeze(0), torch.tensor([3]), True)
    return packed.data


def packs_itself(net: Any, x: Tensor) -> Any:
    packed = nn.utils.rnn.PackedSequence(net.a(x), torch.ones(3, dtype=torch.long))
    return net.rnn(packed)[0].data


def adapts(net: Any, x: Tensor) -> Any:
    y = (x[:, 0] > 9).long()
    return net.adaptive(net.a(x), y).loss


@pytest.mark.parametrize("forward", [picks, assigns])
def test_shapes_that_depend_on_values_are_refused_with_the_users_line(forward: Forward) -> None:
    error = refusal(forward)
    assert "tests/engine/capture/test_capture_errors.py:" in error.problem
    assert f"in {forward.__name__}" in error.problem
    assert "depends on values" in error.problem


@pytest.mark.parametrize(
    ("forward", "instead"),
    [
        (picks, "Keep the shape"),
        (assigns, "torch.where(mask, a, b)"),
        (packs, "not a PackedSequence"),
        (packs_itself, "not a PackedSequence"),
        (adapts, "cross_entropy over all classes"),
        (lambda net, x: net.a(x) if x.sum() > 0 else net.a(-x), "torch.where"),
        (lambda net, x: net.a(x) * net.a.weight.sum().item(), ".item()"),
        (lambda net, x: net.a(x) * next(net.count), "Count in a buffer"),
        (lambda net, x: net.a(x) if random.random() < 2 else x, "Draw with torch"),
        (writes_data, "Write into a buffer"),
        (reads_gradients, "torch.autograd.grad"),
        (lambda net, x: net.a(x + net.plain.add_(1)), "register_buffer"),
    ],
)
def test_what_dynamo_cannot_follow_is_refused_with_what_to_write(
    forward: Forward, instead: str
) -> None:
    error = refusal(forward)
    assert instead in error.instead
    assert error.problem.startswith("torch could not capture Net")


@pytest.mark.parametrize(
    ("file", "instead"),
    [
        ("performer_pytorch/performer.py", "auto_check_redraw=False"),
        ("torchdiffeq/_impl/adjoint.py", "Write odeint for odeint_adjoint"),
        ("torchdiffeq/_impl/misc.py", "method='rk4'"),
        ("pytorch_metric_learning/losses/base.py", "NormalizedSoftmaxLoss"),
        ("elsewhere/layers.py", "look for an argument"),
    ],
)
def test_a_line_of_a_library_is_refused_with_its_switch(
    file: str, instead: str, tmp_path: Path
) -> None:
    source = "def line(net, x):\n    return x if x.sum() > 0 else net.a(x)"
    names: dict[str, Any] = {}
    exec(compile(source, f"{tmp_path}/site-packages/{file}", "exec"), names)
    assert instead in refusal(lambda net, x: names["line"](net, x)).instead


@torch.library.custom_op("refused::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("refused::fill", mutates_args=("out",))
def fill(x: Tensor, out: Tensor) -> Tensor:
    out.copy_(x)
    return x.sum(0)


@fill.register_fake
def _(x: Tensor, out: Tensor) -> Tensor:
    return x.new_empty(x.shape[1:])


def doubles(net: Any, x: Tensor) -> Tensor:
    y = x.clone()
    double_(y)
    return net.a(y)


def doubles_a_buffer(net: Any, x: Tensor) -> Tensor:
    double_(net.running)
    return net.a(x + net.running)


def fills(net: Any, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    return net.a(out + fill(x, out))


@pytest.mark.parametrize(
    ("forward", "name"), [(doubles, "double_"), (doubles_a_buffer, "double_"), (fills, "fill")]
)
def test_a_custom_op_that_writes_into_its_arguments_is_refused_by_name(
    forward: Forward, name: str
) -> None:
    error = refusal(forward)
    assert f"the op refused.{name}.default, which writes into its arguments" in error.problem
    assert "test_capture_errors.py" in error.problem
    assert "return what it makes" in error.instead


@pytest.mark.parametrize("made", [lambda y: {"logits": y}, lambda y: (y,), lambda y: None])
def test_a_model_without_a_loss_is_asked_for_one(made: Callable[[Tensor], Any]) -> None:
    error = refusal(lambda net, x: made(net.a(x)), None)
    assert (error.where, "Set task.loss" in error.instead) == ("task.loss", True)


def test_a_dict_with_a_loss_trains() -> None:
    net = Net(lambda net, x: {"loss": net.a(x).mean(), "logits": x})
    assert dict(capture(Task(net, {"x": "x"}), {"x": torch.ones(3, 4)}).results)["loss"]


def test_what_a_module_prints_and_warns_is_left_out() -> None:
    def talks(net: Any, x: Tensor) -> Any:
        print("shape", x.shape)
        warnings.warn("careful", stacklevel=1)
        return net.a(x)

    graph = capture(Task(Net(talks), {"x": "x"}, mean), {"x": torch.ones(3, 4)})
    plain = capture(Task(Net(lambda n, x: n.a(x)), {"x": "x"}, mean), {"x": torch.ones(3, 4)})
    assert [op.target for op in graph.ops] == [op.target for op in plain.ops]
