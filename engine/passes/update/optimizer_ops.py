"""optimizer_ops: the update of one parameter, as ops (part of the pass update_ops).

AdamW and SGD are one op each.  Any other optimizer is traced to ATen ops, whose outputs are new
tensors; one flow.assign at the end writes the new weight and states, so that nothing changes while
it may still be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from flowrun.engine.capture.update_trace import (
    UpdateFunction,
    UpdateState,
    states_of,
    step_scalars_of,
    trace_of,
)
from flowrun.engine.ir.graph import LogicalTensor, Ref, Variable, map_refs, refs
from flowrun.engine.ir.placement import Shape
from flowrun.engine.ops.flow.rounding import NARROW, ROUND, UPDATE_NARROW, stream_of
from flowrun.engine.ops.flow.sparse import UPDATE_ROWS, RowUpdate
from flowrun.engine.ops.flow.update import ASSIGN, EMA, FUSED
from flowrun.engine.ops.registry import whole_function
from flowrun.engine.passes.update.graph_builder import GraphBuilder, OpPlace
from flowrun.engine.strategy import Kept, Optimizer, Update


@dataclass(frozen=True, slots=True)
class UpdateInputs:
    """Tensors that the update of a parameter reads.

    ids: rows of the table that the gradient consists of; None: all.  coefficient: scalar that
    multiplies the gradient first.  skip: scalar bool; if it is true, the parameter and its states
    stay.  step: scalar number of this update; None: of the training step.
    """

    gradient: str
    ids: str | None = None
    coefficient: str | None = None
    skip: str | None = None
    step: str | None = None


def update(
    builder: GraphBuilder, optimizer: Optimizer, kept: Kept, variable: Variable, reads: UpdateInputs
) -> None:
    """Append the ops that change one parameter and its states."""
    rule = optimizer.update_of(variable.name)
    rate = _rate(builder, optimizer, rule.rate, variable.stage)
    if rule.function is not None and reads.ids is None:
        _add_traced_update(builder, rule, rule.function, kept, variable, rate, reads)
        return
    states, fed = _states_and_numbers(rule, builder.tensors[variable.tensor].shape)
    numbers: dict[str, str] = {"lr": rate} if "lr" in fed else {}
    if "step" in fed:
        numbers["step"] = reads.step or builder.number("@step", variable.stage)
    numbers |= {"coefficient": reads.coefficient} if reads.coefficient else {}
    numbers |= {"skip": reads.skip} if reads.skip else {}
    changed, new = _add_states(builder, variable, states, kept)
    param, *rest = changed
    target, gradients = f"flow.{rule.name}", [reads.gradient]
    by: dict[str, object] = {}
    if is_kept_narrow(builder, variable, kept):
        target = UPDATE_NARROW
        numbers["draw"] = builder.number("@step", variable.stage)
        shape = builder.tensors[variable.tensor].shape
        by = {"optimizer": rule.name, "stream": variable.name, "shape": shape}
        by["seed"] = kept.seed
    if reads.ids is not None:
        by["by"] = RowUpdate(rule.name, rule.function or whole_function(target))
        target, gradients = UPDATE_ROWS, [reads.ids, reads.gradient]
    builder.op(
        f"update/{variable.tensor}",
        target,
        (Ref(param), *map(Ref, gradients), *map(Ref, rest)),
        (*by.items(), *((k, Ref(v)) for k, v in numbers.items()), *rule.numbers),
        new,
        at=OpPlace.of(variable),
    )


def average(builder: GraphBuilder, variable: Variable, decay: float, skip: str | None) -> None:
    """Append the moving average of a weight that has just been updated.

    skip: scalar bool; if it is true, the average stays.
    """
    like = builder.tensors[variable.tensor]
    state = _state(builder, variable, UpdateState("ema", None, like.shape), like.dtype)
    builder.op(
        f"average/{variable.tensor}",
        EMA,
        (Ref(state.tensor), Ref(builder.variables[variable.name].new or "")),
        (("decay", decay), *((("skip", Ref(skip)),) if skip else ())),
        (state.new or "",),
        at=OpPlace.of(variable),
    )


def _states_and_numbers(
    rule: Update, shape: Shape
) -> tuple[Sequence[UpdateState], tuple[str, ...]]:
    """Return (states, numbers that are fed) of an update that is one op."""
    if rule.function is not None:
        return states_of(rule.function, shape), step_scalars_of(rule.function)
    fused = FUSED[rule.name]
    names = fused.states if dict(rule.settings).get(fused.needed, not fused.needed) else ()
    return [UpdateState(name, 0.0, shape) for name in names], fused.fed


def _rate(builder: GraphBuilder, optimizer: Optimizer, lr: float, stage: int) -> str:
    """Return the learning rate as a scalar; parameters of one rate share it."""
    return builder.number(optimizer.rate_field(lr), stage, dict(optimizer.rates).get(lr, (lr,)))


def is_kept_narrow(builder: GraphBuilder, variable: Variable, kept: Kept) -> bool:
    """Return whether a parameter or its states are kept in bf16, and so updated in fp32."""
    dtype = builder.tensors[variable.tensor].dtype
    asked = kept.narrows(variable.name) and dtype in (torch.float32, NARROW)
    return asked and (kept.states or (kept.weights and dtype == NARROW))


def _state_dtype(builder: GraphBuilder, variable: Variable, kept: Kept) -> torch.dtype:
    """Return the dtype of a parameter's states."""
    if not is_kept_narrow(builder, variable, kept):
        return builder.tensors[variable.tensor].dtype
    return NARROW if kept.states else torch.float32


def _state(
    builder: GraphBuilder, variable: Variable, kind: UpdateState, dtype: torch.dtype
) -> Variable:
    """Add a state of a parameter; one of its shape has its home."""
    param = builder.tensors[variable.tensor]
    like = replace(param, shape=kind.shape, dtype=kind.dtype(replace(param, dtype=dtype)))
    tensor = builder.tensor(f"{kind.name}/{variable.tensor}", like)
    name = builder.free_name(f"{kind.name}/{variable.name}")
    state = Variable(
        name,
        tensor,
        "state",
        builder.tensor(f"{tensor}'", like),
        of=variable.name,
        stage=variable.stage,
        start=kind.start,
        pinned=variable.pinned if kind.shape == param.shape else (),
    )
    builder.variables[name] = state
    return state


def _add_states(
    builder: GraphBuilder, variable: Variable, states: Iterable[UpdateState], kept: Kept
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tensors of the parameter and its states, and their new values."""
    new = builder.tensor(f"{variable.tensor}'", builder.tensors[variable.tensor])
    builder.variables[variable.name] = replace(variable, new=new)
    dtype = _state_dtype(builder, variable, kept)
    added = [_state(builder, variable, kind, dtype) for kind in states]
    return (variable.tensor, *(s.tensor for s in added)), (new, *(s.new or "" for s in added))


def _add_traced_update(
    builder: GraphBuilder,
    rule: Update,
    function: UpdateFunction,
    kept: Kept,
    variable: Variable,
    rate: str,
    reads: UpdateInputs,
) -> None:
    param = builder.tensors[variable.tensor]
    narrow = is_kept_narrow(builder, variable, kept)
    if narrow:
        param = replace(param, dtype=torch.float32)
    program = trace_of(rule, function, replace(param, name=variable.name))
    states = states_of(function, param.shape)
    changed, new = _add_states(builder, variable, states, kept)
    at = OpPlace.of(variable)
    read: Sequence[str] = changed
    if narrow:
        read = [builder.cast(f"wide.{tensor}", tensor, torch.float32, at) for tensor in changed]
    names = dict(zip(("param", *(state.name for state in states)), read, strict=True))
    names["grad"] = _scale_and_cast(builder, variable, reads, param)
    names["lr"] = rate
    if any(ref.name == "step" for op in program.ops for ref in refs((op.args, op.kwargs))):
        names["step"] = reads.step or builder.number("@step", variable.stage)
    for op in program.ops:
        swap = lambda ref: Ref(names[ref.name])  # noqa: E731
        names[op.name] = builder.one(
            f"update.{op.name}/{variable.tensor}",
            op.target,
            map_refs(op.args, swap),
            map_refs(op.kwargs, swap),
            like=program.tensors[op.name],
            at=at,
        )
    results = [names[result] for result in program.results]
    if narrow:
        results = _round(builder, variable, changed, results, kept.seed)
    written = zip(changed, results, new, strict=True)
    _assign(builder, variable, list(written), reads.skip)


def _assign(
    builder: GraphBuilder, variable: Variable, written: list[tuple[str, str, str]], skip: str | None
) -> None:
    """Append the op that writes a weight and its states.  written: (old, value, new) of each."""
    shape = builder.tensors[variable.tensor].shape
    alike = [each for each in written if builder.tensors[each[0]].shape == shape]
    others = [each for each in written if each not in alike]
    sides = [tuple(Ref(each[k]) for each in part) for part in (alike, others) for k in (0, 1)]
    builder.op(
        f"update/{variable.tensor}",
        ASSIGN,
        tuple(sides if others else sides[:2]),
        (("skip", Ref(skip)),) if skip else (),
        tuple(new for *_, new in (*alike, *others)),
        at=OpPlace.of(variable),
    )


def _round(
    builder: GraphBuilder,
    variable: Variable,
    changed: Sequence[str],
    results: Sequence[str],
    seed: int,
) -> list[str]:
    """Return new values of a weight and its states in the dtypes that they are kept in."""
    draw = Ref(builder.number("@step", variable.stage))
    out = []
    for k, (old, new) in enumerate(zip(changed, results, strict=True)):
        like = builder.tensors[old]
        if like.dtype == NARROW:
            args = (Ref(new), draw, seed, stream_of(variable.name, k), like.shape)
            new = builder.one(f"round.{old}", ROUND, args, like=like, at=OpPlace.of(variable))
        out.append(new)
    return out


def _scale_and_cast(
    builder: GraphBuilder, variable: Variable, reads: UpdateInputs, param: LogicalTensor
) -> str:
    """Return the gradient times the coefficient, in the parameter's dtype."""
    gradient, at = reads.gradient, OpPlace.of(variable)
    if reads.coefficient is not None:
        args = (Ref(gradient), Ref(reads.coefficient))
        like = builder.tensors[gradient]
        gradient = builder.one(
            f"scaled/{variable.tensor}", "aten.mul.Tensor", args, like=like, at=at
        )
    return builder.cast(f"cast/{variable.tensor}", gradient, param.dtype, at)
