"""run_in_python: AOTAutograd's graph of a module that Python runs, watched."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flowrun.engine.capture.in_python.banned import FrozenError
from flowrun.engine.capture.in_python.known_values import OF_VALUES
from flowrun.engine.capture.in_python.watched_calls import CallWatch, summary_at
from flowrun.engine.ir.graph import LogicalGraph, Variable
from flowrun.engine.torch_internals import (
    FakeTensorMode,
    compiling,
    is_traced,
    storage_id,
    trace_joint,
)


class Ran(NamedTuple):
    """The joint graph, the buffers that forward assigns, and what is left out.

    asked: buffers by whose values Python has decided -> the frames that ask.
    """

    joint: torch.fx.GraphModule
    written: tuple[str, ...]
    notes: tuple[str, ...]
    asked: Mapping[str, list[traceback.FrameSummary]]


def run_in_python(
    make: Callable[[tuple[str, ...]], nn.Module],
    values: Sequence[Tensor],
    tensors: Mapping[str, Tensor],
    train: bool,
) -> Ran:
    """Trace a module; raise FrozenError for what no graph holds.

    make: gives the module, which returns the buffers of these names, too.  tensors: all parameters
    and buffers.  train: return what forward assigns to buffers.
    """
    try:
        return _run(make, values, tensors, train, compiling())
    except OF_VALUES:  # of what a model does for torch.compile alone, perhaps
        with suppress(FrozenError, *OF_VALUES):
            return _run(make, values, tensors, train, nullcontext())
        raise


def _run(
    make: Callable[[tuple[str, ...]], nn.Module],
    values: Sequence[Tensor],
    tensors: Mapping[str, Tensor],
    train: bool,
    mode: AbstractContextManager[None],
) -> Ran:
    names = {id(tensor): name for name, tensor in tensors.items()}
    buffers = {id(t): names[id(t)] for t in tensors.values() if not isinstance(t, nn.Parameter)}
    written: tuple[str, ...] = ()
    for _ in range(2):
        program, fake = make(written), FakeTensorMode(allow_non_fake_inputs=True)
        watch = CallWatch(program, buffers)
        with watch.active(), mode, ExitStack() as stack:
            given = [fake.from_tensor(value) for value in values]
            try:
                joint = trace_joint(stack, program, given).graph_module
            finally:  # what is refused may have failed in a later call
                if watch.refused:
                    raise watch.refused[0]
        if error := watch.difference():
            raise error
        _check_constants(joint, tensors)
        assigned = tuple(names[number] for number in watch.assigned if number in names)
        if written or not train or not assigned:
            break
        written = assigned
    return Ran(joint, written, tuple(watch.notes), watch.asked)


def _check_constants(joint: torch.fx.GraphModule, tensors: Mapping[str, Tensor]) -> None:
    """Raise FrozenError for a weight or buffer, or a tensor of an earlier call, as a constant."""
    names = {storage_id(tensor): name for name, tensor in tensors.items()}
    for node in joint.graph.nodes:
        value = getattr(joint, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(value, Tensor) and (is_traced(value) or storage_id(value) in names):
            name = "a tensor" if is_traced(value) else names[storage_id(value)]
            lines = re.findall('File "(.+)", line (.+), in (.+)', node.meta.get("stack_trace", ""))
            frames = [summary_at((file, int(number), name)) for file, number, name in lines]
            raise FrozenError(
                f"forward reads {name} from a list, a closure or a call before", frames
            )


def keep_used(
    graph: LogicalGraph, written: Collection[str], asked: Mapping[str, list[traceback.FrameSummary]]
) -> tuple[Variable, ...]:
    """Return the variables that are read or written, and those that `decide`: Python has asked for
    their values.

    written: those that forward writes into.  Raise FrozenError if one of them decides.
    """
    for name in asked:
        if name in written:
            reason = f"Python asks for the value of the buffer {name}, into which forward writes"
            raise FrozenError(reason, asked[name])
    used = {name for op in graph.ops for name in op.inputs} | {name for _, name in graph.results}
    marked = (replace(v, decides=v.name in asked) for v in graph.variables)
    return tuple(v for v in marked if v.decides or v.tensor in used or v.name in written)
