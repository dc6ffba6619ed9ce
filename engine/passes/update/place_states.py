"""place_states: boxed -> boxed.  States of the optimizer lie in the host's memory.

A state is copied to the device before the op that reads it, changed there, and copied back
(flow.to_device, flow.to_host): a change of placement, by actors of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from flowrun.engine.hardware.hardware import CPU
from flowrun.engine.ir.graph import LogicalGraph, LogicalTensor, Op, Ref, Variable, rename_inputs
from flowrun.engine.ir.placement import largest_shape
from flowrun.engine.ops.flow.structure import TO_DEVICE, TO_HOST
from flowrun.engine.strategy import Strategy


def place_states(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Put the states of weights on the host, if the strategy asks for it (a pass)."""
    if not strategy.states_on_host:
        return graph
    moved = {v.tensor: v for v in graph.variables if _may_move(graph, v)}
    copies = _Copies(moved, {v.new: v for v in moved.values()}, dict(graph.tensors), set())
    ops = tuple(each for op in graph.ops for each in copies.around(op))
    variables = tuple(
        replace(v, copies=(_there(v.tensor), _there(v.new or ""))) if v.tensor in moved else v
        for v in graph.variables
    )
    note = _describe(moved, copies.tensors, strategy)
    return replace(
        graph, ops=ops, tensors=copies.tensors, variables=variables, notes=(*graph.notes, note)
    )


def _may_move(graph: LogicalGraph, variable: Variable) -> bool:
    """Return whether a variable is of the update alone: evaluation reads averages of weights."""
    numbers = variable.kind == "state" and variable.of and variable.start is not None
    return bool(numbers and variable.new and graph.tensors[variable.tensor].shape)


def _there(name: str) -> str:
    """Name a tensor's copy on the device."""
    return f"{name}@device"


@dataclass(frozen=True, slots=True)
class _Copies:
    """The copies of states.

    moved: states, by tensor; old_of: by the tensor that they become.  tensors: of the graph so far.
    there: those that are on the device.
    """

    moved: Mapping[str, Variable]
    old_of: Mapping[str | None, Variable]
    tensors: dict[str, LogicalTensor]
    there: set[str]

    def around(self, op: Op) -> Iterator[Op]:
        """Yield the copies that an op needs, the op, and the copies back of what it makes."""
        read = {name: _there(name) for name in op.inputs if name in self.moved}
        made = {name: _there(name) for name in op.makes if name in self.old_of}
        for name, copy in read.items():
            if name not in self.there:
                self.there.add(name)
                yield self._copy(TO_DEVICE, name, copy, op, self.moved[name])
        self.tensors.update({new: replace(self.tensors[n], name=new) for n, new in made.items()})
        outputs = tuple(name and made.get(name, name) for name in op.outputs)
        yield replace(rename_inputs(op, read), outputs=outputs)
        for name, copy in made.items():
            yield self._copy(TO_HOST, copy, name, op, self.old_of[name])

    def _copy(self, target: str, source: str, made: str, like: Op, state: Variable) -> Op:
        self.tensors[made] = replace(self.tensors[source], name=made)
        return Op(
            f"copy/{made}",
            target,
            (Ref(source),),
            outputs=(made,),
            module=like.module,
            phase=like.phase,
            stage=state.stage,
            in_sbp=(state.nd_sbp,),
            out_sbp=(state.nd_sbp,),
        )


def _describe(
    states: Mapping[str, Variable], tensors: Mapping[str, LogicalTensor], strategy: Strategy
) -> str:
    held = [0] * strategy.num_stages
    for name, v in states.items():
        shape = largest_shape(tensors[name].shape, v.nd_sbp, strategy.placements[v.stage].shape)
        held[v.stage] += replace(tensors[name], shape=shape).num_bytes
    if not states:
        return "the optimizer has no states that could lie on the host (placement.states)"
    apart = strategy.hardware.device != CPU
    there = "" if apart else ", which on a CPU is the ranks' own memory: this saves none"
    return f"states of the optimizer lie on the host: {max(held):,} bytes a rank{there}"
