import pytest
import torch
from torch import Tensor, nn

from flowrun.engine.capture.capture import capture_evaluation
from support.layouts.grids import FIVE, Layout, example, run_plan, task, virtual_run
from support.layouts.plain_loop import classifier, micro_batch_loop, pins

STEPS = 3


class Counting(nn.Module):
    """Counts its micro-batches, keeps an average of what it makes, which it subtracts, and the last
    mean, which nothing reads again.
    """

    count: Tensor
    average: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(64, 12), nn.Linear(12, 10)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(12))
        self.register_buffer("last", torch.zeros(12))

    def forward(self, x_BI: Tensor) -> Tensor:
        hidden_BH = torch.tanh(self.hidden(x_BI))
        self.count += 1
        self.last = hidden_BH.detach().mean(0)
        out: Tensor = self.output(hidden_BH - self.average) * (1 + self.average.mean())
        with torch.no_grad():
            self.average.mul_(0.8).add_(hidden_BH.mean(0), alpha=0.2)
        return out


COUNTING = classifier(Counting, "x_BI", pins({"hidden.*": 0}), micro_batches=2)


@pytest.mark.parametrize("layout", [*FIVE, Layout(data=2, tensor=2, in_flight=2)], ids=str)
def test_a_buffer_changes_with_every_micro_batch(layout: Layout) -> None:
    losses, state = micro_batch_loop(COUNTING, STEPS)
    run = virtual_run(COUNTING, layout, STEPS)
    assert run.losses == pytest.approx(losses, rel=1e-5)
    assert int(run.weights["count"]) == STEPS * COUNTING.micro_batches
    for name, value in state.items():
        torch.testing.assert_close(run.weights[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order_seed", range(3))
def test_messages_in_any_order_change_the_buffers_alike(order_seed: int) -> None:
    layout = Layout(data=2, stages=2)
    expected = virtual_run(COUNTING, layout, STEPS)
    run = run_plan(COUNTING, expected.plan, STEPS, order_seed)
    assert run.losses == expected.losses
    assert all(torch.equal(run.weights[k], expected.weights[k]) for k in expected.weights)


def test_a_buffer_with_readers_elsewhere_is_a_register_of_one_slot() -> None:
    plan = virtual_run(COUNTING, Layout(data=2), STEPS).plan
    (average,) = (v for v in plan.graph.variables if v.name == "average")
    registers = [r for r in plan.registers if average.tensor in r.tensors]
    assert registers
    assert all((r.slots, r.initial, r.per_step) == (1, 1, False) for r in registers)


def test_evaluation_writes_nothing() -> None:
    assert not capture_evaluation(task(COUNTING), example(COUNTING)).running
