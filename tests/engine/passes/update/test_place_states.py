"""States of the optimizer in the host's memory train as states on the device do, and are on the
device a few blocks at a time.
"""

from dataclasses import replace

import pytest
import torch

from flowrun.engine.actors.plan import COPY, Plan
from flowrun.engine.compile import plan_training
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.lowering import add_registers
from flowrun.engine.rehearsal.rehearsal import rehearse
from support.layouts.grids import Layout, captured, compiled, run_plan, strategy
from support.layouts.plain_loop import gpt

TRAINING = gpt(blocks=4, width=16, samples=8, micro_batches=2)
LAYOUTS = (
    Layout(),
    Layout(data=2, zero=1),
    Layout(data=2, zero=3, clip_norm=0.1),
    Layout(tensor=2),
    Layout(data=2, tensor=2, zero=2),
    Layout(stages=2, data=2, zero=1),
)


def planned(layout: Layout, **changes: object) -> Plan:
    asked = replace(strategy(TRAINING, layout), states_on_host=True, **changes)  # type: ignore[arg-type]
    return plan_training(captured(TRAINING), asked).plan


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_states_on_the_host_give_the_numbers_of_states_on_the_device(layout: Layout) -> None:
    on_host = run_plan(TRAINING, planned(layout), 3)
    on_device = run_plan(TRAINING, compiled(TRAINING, layout).plan, 3)
    assert on_host.losses == on_device.losses
    assert on_host.weights.keys() == on_device.weights.keys()
    assert all(torch.equal(on_host.weights[k], w) for k, w in on_device.weights.items())


def most_copied(plan: Plan) -> int:
    """Return the most blocks of states that are on the device at once."""
    first = rehearse(plan, lambda actor: 1.0).first_step
    copies = [event for event in first if plan.actors[event.actor].kind == COPY]
    there = lambda event: -1 if plan.actors[event.actor].updates else 1  # noqa: E731
    changes = sorted((e.end if there(e) < 0 else e.start, there(e)) for e in copies)
    held = [sum(n for _, n in changes[: k + 1]) for k in range(len(changes))]
    assert held[-1] == 0
    return max(held)


def test_two_blocks_of_states_are_on_the_device_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_copied(planned(Layout())) == 2
    monkeypatch.setattr(add_registers.Throttle, "_copies", lambda *_: ())
    assert most_copied(planned(Layout())) > 4


def test_a_device_holds_what_is_copied_and_a_cpu_all() -> None:
    def most(hardware: Hardware, on_host: bool) -> int:
        asked = replace(strategy(TRAINING, Layout()), states_on_host=on_host, hardware=hardware)
        rehearsed = plan_training(captured(TRAINING), asked)
        return rehearsed.rehearsal.peak_bytes[0]

    cpu = Hardware()
    states = 2 * sum(
        tensor.num_bytes
        for v in compiled(TRAINING, Layout()).plan.variables.values()
        for tensor in [compiled(TRAINING, Layout()).plan.tensors[v.tensor]]
        if v.kind == "parameter"
    )
    gpu = replace(cpu, device="cuda")
    assert most(gpu, True) <= most(gpu, False) - states // 2
    assert most(cpu, True) >= most(cpu, False)
