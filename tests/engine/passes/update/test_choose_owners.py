"""choose_owners: a matrix that an update needs whole is updated by one rank, and all have alike."""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from flowrun.engine.ir.graph import UPDATE, LogicalGraph
from flowrun.engine.ir.sbp import Owned
from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from flowrun.engine.strategy import Update
from flowrun.engine.torch_internals import DispatchMode
from flowrun.launcher.job.optimizer import optimizer_of
from flowrun.launcher.recipe.schema import Optim
from support.layouts.grids import Layout, compiled, initial, weights_of
from support.layouts.plain_loop import BLOCKS, TINY_GPT, Training

STEPS, ITERATIONS = 2, 5
MUON = {"lr": 0.02, "update": "muon"}
MATRICES = 4 * BLOCKS
MM = "aten.mm.default"


@cache
def training() -> Training:
    """Matrices of the blocks by Muon, in bf16 as torch has it; the rest by AdamW, in fp32."""
    groups = {"blocks.*.attn.*.weight": MUON, "blocks.*.mlp.*.weight": MUON}
    return replace(TINY_GPT, optimizer=optimizer_of(Optim(groups=groups), STEPS))


def graph_of(layout: Layout) -> LogicalGraph:
    return compiled(training(), layout).plan.graph


class Products(DispatchMode):
    """Counts products of bf16 matrices: those of Muon alone."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        product = func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.count += product and args[0].dtype == torch.bfloat16
        return func(*args, **(kwargs or {}))


LAYOUTS = [
    Layout(),
    Layout(data=2),
    Layout(data=4),
    Layout(tensor=2),
    Layout(stages=2, tensor=2),
    *(Layout(data=2, tensor=2, zero=stage) for stage in (1, 2, 3)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_matrix_is_made_orthogonal_once_among_all_ranks(layout: Layout) -> None:
    ranks = VirtualCluster(compiled(training(), layout).plan, training().rows, initial(training()))
    with Products() as products:
        ranks.run(STEPS)
    assert products.count == STEPS * MATRICES * ITERATIONS * 3


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_owners_work_about_as_long(layout: Layout) -> None:
    """Of 8 or 16 matrices in 3 shapes, for 2 or 4 ranks."""
    notes = [note for note in graph_of(layout).notes if "owns" in note]
    assert len(notes) == layout.stages
    for note in notes:
        least, most = map(float, re.findall(r"([\d.]+) (?:to|ms)", note))
        assert least <= most <= 1.3 * least
    muls = [op for op in graph_of(layout).ops if op.target == MM and op.phase == UPDATE]
    owners = {(op.stage, op.owner) for op in muls}
    assert len(muls) == MATRICES * ITERATIONS and len(owners) == layout.num_ranks


def test_products_are_owned_and_what_works_by_elements_is_split() -> None:
    graph = graph_of(Layout(data=2, tensor=2, zero=1))
    updates = [op for op in graph.ops if op.phase == UPDATE and op.owner is not None]
    for op in updates:
        owned = {isinstance(sbp, Owned) for nd_sbp in op.out_sbp for sbp in nd_sbp}
        if op.target in (MM, "aten.addmm.default"):
            assert owned == {True}, op
        if op.target == "aten.lerp.Scalar":
            assert owned == {False}, op
    assert not any(isinstance(sbp, Owned) for v in graph.variables for sbp in v.nd_sbp)
    (note,) = (n for n in graph.notes if "owns" in n)
    assert f"each of {MATRICES} matrices is updated by one rank that owns it, of 4" in note


def test_an_update_by_elements_has_no_owner() -> None:
    plan = compiled(TINY_GPT, Layout(data=2, zero=1)).plan
    assert all(op.owner is None for op in plan.graph.ops)


# ---- numbers -------------------------------------------------------------------------------------


def exact_muon(param: Tensor, grad: Tensor, momentum: Tensor, *, lr: Tensor) -> tuple[Tensor, ...]:
    """torch's Muon without bf16, which makes 2 % of a step of the rounding of a gradient."""
    momentum = momentum.lerp(grad, 0.05)
    x = grad.lerp(momentum, 0.95)
    x = x / x.norm()
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.775 * gram) @ x
    return param - lr * x, momentum


@cache
def exact() -> Training:
    made = training().optimizer
    groups = tuple(
        replace(group, update=Update("exact_muon", (), exact_muon)) for group in made.groups
    )
    return replace(TINY_GPT, optimizer=replace(made, groups=groups))


@cache
def by_hand() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights before and after a plain loop: Muon as above, and torch's AdamW for the rest."""
    model = TINY_GPT.model().train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    matrices = [p for n, p in model.named_parameters() if "blocks" in n and p.dim() == 2]
    momenta = [torch.zeros_like(p) for p in matrices]
    others = [p for p in model.parameters() if all(p is not each for each in matrices)]
    rest = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for batch in TINY_GPT.batches[:5]:
        model.zero_grad()
        TINY_GPT.output_loss(model, batch)[1].backward()  # type: ignore[no-untyped-call]
        rest.step()
        with torch.no_grad():
            for k, p in enumerate(matrices):
                assert p.grad is not None
                new, momenta[k] = exact_muon(p, p.grad, momenta[k], lr=torch.tensor(MUON["lr"]))
                p.copy_(new)
    return before, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_muon_beside_adamw_is_as_a_plain_loop_has_it(layout: Layout) -> None:
    ranks = VirtualCluster(compiled(exact(), layout).plan, exact().rows, initial(exact()))
    ranks.run(5)
    found, (before, after) = weights_of(ranks), by_hand()
    for name, weight in after.items():
        off, moved = found[name] - weight, weight - before[name]
        assert off.abs().max() <= 1e-6, name  # measured: 2e-7
        assert off.norm() <= 2e-5 * moved.norm(), name  # measured: 5e-6


def test_torchs_muon_computes_what_its_class_does() -> None:
    weight, momentum = torch.randn(12, 5), torch.zeros(12, 5)
    own = weight.clone()
    optimizer = torch.optim.Muon([own], lr=0.02)
    update = training().optimizer.groups[0].update
    assert update is not None and update.function is not None
    for done in range(3):
        own.grad = torch.randn(12, 5)
        optimizer.step()
        fed = {"lr": torch.tensor(0.02), "step": torch.tensor(done + 1.0)}
        weight, momentum = update.function(weight, own.grad, momentum, **fed)
        torch.testing.assert_close(weight, own)


def whitened(param: Tensor, grad: Tensor, second: Tensor, *, lr: Tensor) -> tuple[Tensor, ...]:
    """Products that read the weight and a state themselves."""
    second = 0.9 * second + grad @ (grad.T @ param)
    return param - lr * (second @ (param.T @ grad)), second


def test_a_product_of_a_weight_and_a_state_is_owned() -> None:
    groups = tuple(
        replace(group, update=Update("whitened", (), whitened), settings=(("lr", 1e-3),))
        for group in training().optimizer.groups
    )
    made = replace(TINY_GPT, optimizer=replace(training().optimizer, groups=groups))
    found = []
    for layout in (Layout(), Layout(data=2, tensor=2, zero=1)):
        ranks = VirtualCluster(compiled(made, layout).plan, made.rows, initial(made))
        ranks.run(STEPS)
        found.append(weights_of(ranks))
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, atol=1e-5, rtol=1e-4)
