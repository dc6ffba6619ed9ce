"""verify: what each level of a LogicalGraph promises (ir/graph.py has the levels).

GRAPH_RULES is the list, one row a rule; layout_rules.py has those of nd-SBPs.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowrun.engine.ir.graph import (
    BACKWARD,
    CAPTURED,
    FORWARD,
    LEVELS,
    PHASES,
    STAGED,
    TRAINED,
    LogicalGraph,
)
from flowrun.engine.ir.op_info import Trait
from flowrun.engine.ops.flow.structure import TRANSFER
from flowrun.engine.ops.traits import has
from flowrun.engine.strategy import Strategy
from flowrun.engine.verify.layout_rules import LAYOUT_RULES
from flowrun.engine.verify.rules import Fault, Rules, Subject, find_repeated, refuse_faults

KINDS = ("parameter", "buffer", "state")


def verify(graph: LogicalGraph, strategy: Strategy, made_by: str = "") -> None:
    """Raise PlanError if the graph breaks a promise of its level; it names the op and the pass."""
    refuse_faults(GRAPH_RULES, Subject(graph, strategy), LEVELS, graph.level, made_by)


def _find_repeated_names(subject: Subject) -> Iterator[Fault]:
    """Ops, tensors and variables have names of their own."""
    graph = subject.graph
    for name in find_repeated(op.name for op in graph.ops):
        yield Fault(f"op {name}", "two ops have this name.")
    sources = [source.tensor for source in graph.sources]
    for name in find_repeated([*sources, *(name for op in graph.ops for name in op.makes)]):
        yield Fault(f"tensor {name}", "it has two makers.")
    for name in find_repeated(v.name for v in graph.variables):
        yield Fault(f"variable {name}", "two variables have this name.")


def _find_unknown_tensors(subject: Subject) -> Iterator[Fault]:
    """Every tensor has a shape and a dtype."""
    graph = subject.graph
    for op in graph.ops:
        for name in (*op.inputs, *op.makes):
            if name not in graph.tensors:
                yield Fault(op, f"%{name} has neither a shape nor a dtype.")
    for source in graph.sources:
        if source.tensor not in graph.tensors:
            yield Fault(f"source {source.tensor}", "it has neither a shape nor a dtype.")
    for name, tensor in graph.tensors.items():
        if tensor.name != name:
            yield Fault(f"tensor {name}", f"the graph lists it under this name, not {tensor.name}.")


def _find_late_inputs(subject: Subject) -> Iterator[Fault]:
    """What an op reads enters the graph, or an op before makes it."""
    there = {source.tensor for source in subject.graph.sources}
    for op in subject.graph.ops:
        for name in op.inputs:
            if name not in there:
                later = "a later op makes it" if name in subject.graph.producer else "nothing does"
                yield Fault(op, f"it reads %{name}, which no op before makes: {later}.")
        there.update(op.makes)


def _find_later_phases(subject: Subject) -> Iterator[Fault]:
    """An op reads no phase after its own."""
    rank = {phase: k for k, phase in enumerate(PHASES)}
    for op in subject.graph.ops:
        if op.phase not in rank:
            yield Fault(op, f"its phase is {op.phase!r}.")
            continue
        for name in op.inputs:
            maker = subject.graph.producer.get(name)
            if maker and rank[maker.phase] > rank[op.phase]:
                yield Fault(op, f"phase {op.phase} reads %{name}, which phase {maker.phase} makes.")


def _find_wrong_phases(subject: Subject) -> Iterator[Fault]:
    """Capture makes ops of forward and backward alone."""
    if subject.graph.level == CAPTURED:
        for op in subject.graph.ops:
            if op.phase not in (FORWARD, BACKWARD):
                yield Fault(op, f"its phase is {op.phase}.")


def _find_lost_results(subject: Subject) -> Iterator[Fault]:
    """An op makes each result."""
    graph = subject.graph
    for name, tensor in graph.results:
        if tensor not in graph.producer:
            yield Fault(f"result {name}", f"no op makes %{tensor}.")


def _find_bad_variables(subject: Subject) -> Iterator[Fault]:
    """A variable becomes a tensor of its own shape and dtype."""
    graph = subject.graph
    names = {v.name for v in graph.variables}
    for v in graph.variables:
        where = f"variable {v.name}"
        if v.kind not in KINDS:
            yield Fault(where, f"its kind is {v.kind!r}.")
        if v.kind == "state" and v.of and v.of not in names:
            yield Fault(where, f"it is the state of {v.of}, which is not a variable.")
        if v.new is None:
            continue
        if v.new not in graph.producer:
            yield Fault(where, f"no op makes its new value, %{v.new}.")
            continue
        old, new = graph.tensors[v.tensor], graph.tensors[v.new]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            yield Fault(where, f"{old} becomes {new}.")


def _find_stages_outside(subject: Subject) -> Iterator[Fault]:
    """Stage and chunk of every op and source are those of a placement."""
    stages, chunks = subject.strategy.num_stages, subject.strategy.chunks
    for op in subject.graph.ops:
        if not (0 <= op.stage < stages and 0 <= op.chunk < chunks):
            yield Fault(op, f"it is of stage {op.stage} and chunk {op.chunk}.")
    for source in subject.graph.sources:
        if not 0 <= source.stage < stages:
            yield Fault(f"source {source.tensor}", f"it is of stage {source.stage}.")


def _find_feeds_of_others(subject: Subject) -> Iterator[Fault]:
    """A field of the batch enters at every stage that reads it."""
    graph = subject.graph
    for feed in graph.feeds:
        for op in graph.consumers.get(feed.tensor, ()):
            if op.stage != feed.stage and op.target != TRANSFER:
                fact = f"stage {op.stage} reads %{feed.tensor}, which enters at {feed.stage}."
                yield Fault(op, fact)


def _find_mixed_rates(subject: Subject) -> Iterator[Fault]:
    """An op that runs once a step reads variables and sums alone.

    An op that runs once a step reads sums alone of what every micro-batch makes.
    """
    graph = subject.graph
    if subject.strategy.micro_batches == 1:
        return
    once = {v.tensor for v in graph.variables} | {f.tensor for f in graph.feeds if f.per_step}
    for op in graph.ops:
        late = [name for name in op.inputs if op.per_step and name not in once]
        for name in late:
            yield Fault(op, f"it runs once a step and reads %{name}, made more often.")
        if op.per_step or has(op.target, Trait.SUM):
            once.update(op.makes)


def _find_loose_gradients(subject: Subject) -> Iterator[Fault]:
    """Gradients are accumulated, and are not results any more.

    A gradient that is still a result was not accumulated, and updates nothing.
    """
    for name, tensor in subject.graph.results:
        if name.startswith("grad/"):
            yield Fault(f"result {name}", f"%{tensor} is a gradient that no update reads.")


GRAPH_RULES: Rules[Subject] = {
    CAPTURED: (
        _find_repeated_names,
        _find_unknown_tensors,
        _find_late_inputs,
        _find_wrong_phases,
        _find_later_phases,
        _find_lost_results,
        _find_bad_variables,
    ),
    STAGED: (_find_stages_outside, _find_feeds_of_others),
    TRAINED: (_find_loose_gradients, _find_mixed_rates),
    **LAYOUT_RULES,
}
