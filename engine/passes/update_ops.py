"""update_ops: staged -> trained.  Accumulation, clipping and the optimizer join the graph as ops.

For every parameter: accumulate its gradient over the micro-batches (flow.accumulate), clip all
gradients by their global norm (flow.sumsq, flow.add_n, flow.clip_scale), then update (flow.adamw,
flow.sgd).  Their layout follows by the same rules as any other op's; that is all there is to ZeRO
and to clipping under tensor parallelism and stages. The loss of a step is the mean over its
micro-batches: each micro-batch's tangent is 1 / micro_batches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flowrun.engine.graph import (
    BACKWARD,
    FORWARD,
    UPDATE,
    Feed,
    LogicalGraph,
    Op,
    Ref,
    Tensor,
    Variable,
)
from flowrun.engine.strategy import Strategy

STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def update_ops(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Adds accumulators, clipping, updates, optimizer states, and the step's mean loss."""
    builder = _Builder(graph, strategy)
    gradients: dict[str, list[str]] = {}  # parameter -> its gradient, in parts if tied over stages
    for name, tensor in graph.results:
        if name.startswith("grad/"):
            gradients.setdefault(name.removeprefix("grad/"), []).append(tensor)
    trained = [v for v in graph.variables if v.name in gradients]
    accumulated = {v.name: builder.accumulate(gradients[v.name], v) for v in trained}
    scale = builder.clip(accumulated, trained) if strategy.optimizer.clip_norm > 0 else None
    for variable in trained:
        builder.update(variable, accumulated[variable.name], scale)
    results = [
        builder.mean_result(name, t) for name, t in graph.results if not name.startswith("grad/")
    ]
    return builder.graph(tuple(results))


class _Builder:
    """Collects what the pass adds."""

    def __init__(self, graph: LogicalGraph, strategy: Strategy) -> None:
        self.base = graph
        self.strategy = strategy
        self.tensors = dict(graph.tensors)
        self.ops: list[Op] = (
            [self._tangent()] if any(f.field == "@tangent" for f in graph.feeds) else []
        )
        self.added: list[Op] = []
        self.variables: dict[str, Variable] = {v.name: v for v in graph.variables}
        self.feeds: dict[str, Feed] = {f.tensor: f for f in graph.feeds if f.field != "@tangent"}

    def _tangent(self) -> Op:
        feed = next(f for f in self.base.feeds if f.field == "@tangent")
        value = 1.0 / self.strategy.micro_batches
        return Op(
            "tangent",
            "aten.full.default",
            ((), value),
            (("dtype", self.base.tensors[feed.tensor].dtype),),
            (feed.tensor,),
            "loss",
            BACKWARD,
            feed.stage,
        )

    def _made(self, name: str, like: Tensor | None = None) -> str:
        shape, dtype = (like.shape, like.dtype) if like else ((), torch.float32)
        self.tensors[name] = Tensor(name, shape, dtype)
        return name

    def accumulate(self, parts: list[str], variable: Variable) -> str:
        """Sum of a gradient over the micro-batches of a step, and of its parts once a step."""
        name = f"grad/{variable.name}"
        if len(parts) == 1:
            return self._accumulate(parts[0], name)
        sums = tuple(
            Ref(self._accumulate(part, f"grad@{self.base.producer[part].stage}/{variable.name}"))
            for part in parts
        )
        made = self._made(name, self.tensors[parts[0]])
        module = variable.name.rpartition(".")[0]
        self.added.append(Op(made, "flow.add_n", sums, (), (made,), module, UPDATE, variable.stage))
        return made

    def _accumulate(self, tensor: str, name: str) -> str:
        """Sum of a tensor over the micro-batches of a step; runs where the tensor is made."""
        source = self.base.producer[tensor]
        made = self._made(name, self.tensors[tensor])
        self.added.append(
            Op(
                made,
                "flow.accumulate",
                (Ref(tensor),),
                (),
                (made,),
                source.module,
                BACKWARD,
                source.stage,
            )
        )
        return made

    def clip(self, gradients: dict[str, str], variables: list[Variable]) -> str:
        """Coefficient min(1, max_norm / norm) of the global norm; partial sums of a stage first,
        then over the stages.
        """
        totals: list[Any] = []
        for stage in sorted({v.stage for v in variables}):
            squares = []
            for v in (v for v in variables if v.stage == stage):
                made = self._made(f"sumsq/{v.name}")
                self.added.append(
                    Op(
                        made,
                        "flow.sumsq",
                        (Ref(gradients[v.name]),),
                        (),
                        (made,),
                        v.name.rpartition(".")[0],
                        UPDATE,
                        stage,
                    )
                )
                squares.append(Ref(made))
            total = self._made(f"sumsq@{stage}")
            self.added.append(
                Op(total, "flow.add_n", tuple(squares), (), (total,), "", UPDATE, stage)
            )
            totals.append(Ref(total))
        norm = totals[0].name
        if len(totals) > 1:
            norm = self._made("sumsq")
            self.added.append(Op(norm, "flow.add_n", tuple(totals), (), (norm,), "", UPDATE, 0))
        scale = self._made("clip_scale")
        max_norm = self.strategy.optimizer.clip_norm
        self.added.append(
            Op(scale, "flow.clip_scale", (Ref(norm), max_norm), (), (scale,), "", UPDATE, 0)
        )
        return scale

    def update(self, variable: Variable, gradient: str, scale: str | None) -> None:
        """One update op for one parameter, with its optimizer states."""
        optimizer = self.strategy.optimizer
        param = self.tensors[variable.tensor]
        states = []
        for kind in STATES[optimizer.name]:
            name = f"{kind}/{variable.name}"
            new = self._made(f"{name}'", param)
            self.variables[name] = Variable(
                name, self._made(name, param), "state", new, variable.name, variable.stage
            )
            states.append(name)
        new_param = self._made(f"{variable.tensor}'", param)
        self.variables[variable.name] = replace(variable, new=new_param)
        args: tuple[Any, ...] = (
            Ref(variable.tensor),
            Ref(gradient),
            Ref(scale) if scale else None,
            *map(Ref, states),
        )
        if optimizer.name == "adamw":
            args = (*args, Ref(self._step_feed(variable.stage)))
        outputs = (new_param, *(f"{s}'" for s in states))
        self.added.append(
            Op(
                f"update/{variable.name}",
                f"flow.{optimizer.name}",
                args,
                optimizer.arguments,
                outputs,
                variable.name.rpartition(".")[0],
                UPDATE,
                variable.stage,
            )
        )

    def _step_feed(self, stage: int) -> str:
        """The number of this step, counted from 1, as a scalar that the stage's reader supplies
        once a step.
        """
        name = f"@step@{stage}"
        if name not in self.feeds:
            self.feeds[name] = Feed("@step", self._made(name), stage, per_step=True)
        return name

    def mean_result(self, name: str, tensor: str) -> tuple[str, str]:
        """Mean of a scalar result over the micro-batches of the step."""
        source = self.base.producer[tensor]
        total = self._made(f"{name}/sum", self.tensors[tensor])
        self.added.append(
            Op(
                total,
                "flow.accumulate",
                (Ref(tensor),),
                (),
                (total,),
                "loss",
                FORWARD,
                source.stage,
            )
        )
        mean = self._made(f"{name}/mean", self.tensors[tensor])
        self.added.append(
            Op(
                mean,
                "aten.mul.Tensor",
                (Ref(total), 1.0 / self.strategy.micro_batches),
                (),
                (mean,),
                "",
                UPDATE,
                source.stage,
            )
        )
        return name, mean

    def graph(self, results: tuple[tuple[str, str], ...]) -> LogicalGraph:
        """Everything together, in topological order: forward, backward, accumulators, update."""
        forward = [op for op in self.base.ops if op.phase == FORWARD]
        backward = [op for op in self.base.ops if op.phase == BACKWARD]
        micro = [op for op in self.added if op.phase != UPDATE]
        after = [op for op in self.added if op.phase == UPDATE]
        order = _stable_order([*forward, *self.ops, *backward, *micro])
        return replace(
            self.base,
            ops=(*order, *after),
            tensors=self.tensors,
            variables=tuple(self.variables.values()),
            feeds=tuple(self.feeds.values()),
            results=results,
            level="trained",
        )


def _stable_order(ops: list[Op]) -> list[Op]:
    """Accumulators directly behind the op whose output they sum; everything else as it was."""
    behind: dict[str, list[Op]] = {}
    for op in ops:
        if op.target == "flow.accumulate":
            behind.setdefault(op.inputs[0], []).append(op)
    out: list[Op] = []
    for op in ops:
        if op.target != "flow.accumulate":
            out.append(op)
            for name in op.makes:
                out.extend(behind.get(name, ()))
    return out
