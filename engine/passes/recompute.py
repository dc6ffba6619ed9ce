"""recompute: activation checkpointing.  Backward computes again what it would else have stored.

    recompute: {modules: ["blocks.*"], keep: [matmul], whole: false}

For every module that a pattern names (a pattern covers the modules inside), copies of its forward
ops, named "x/again", join the backward region.  They start from kept tensors: the inputs of the
module, tensors that ops outside of it read in backward, and the outputs of the classes of ops in
`keep`.  Only tensors that backward reads are computed again, as torch.utils.checkpoint does, which
stops early.  With `whole` all that are not kept are, as Megatron-LM and OneFlow do: what nobody
reads, as the last product of a block, is computed with the rest of it and freed at once; and kept
products wait for backward of their block also where nothing reads them.

The pass runs after infer_sbp: a copy has the layout of its original, so that it computes the same
bits, and the cost of repeated boxing is known.  It runs before shard_optimizer: under ZeRO 3 a copy
reads the weights that backward gathers anyway.

Nothing may run early, or nothing is saved: a copy reads kept values through `flow.after(kept,
gradient)`, which returns its first input and reads the gradient that enters the module.  That is
an ordinary dependency: regions and schedulers need to know nothing.  For the same reason weight
gradients of these modules stay in backward: to run late they would hold the recomputed tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property

from flowrun.engine.boxing.boxing import path
from flowrun.engine.cost.stored import moved_bytes, stored_bytes
from flowrun.engine.errors import RecipeError
from flowrun.engine.ir.graph import (
    BACKWARD,
    FORWARD,
    UPDATE,
    WEIGHT_GRAD,
    LogicalGraph,
    Op,
    Ref,
    replace_inputs,
)
from flowrun.engine.ir.module_path import within
from flowrun.engine.ir.op_info import ProductKind, Trait
from flowrun.engine.ir.sbp import NdSbp
from flowrun.engine.ops.flow.check import AFTER
from flowrun.engine.ops.registry import info
from flowrun.engine.ops.traits import has, is_view
from flowrun.engine.strategy import Strategy

_ALL, _NONE, _EVERY_SECOND = slice(None), slice(0), slice(None, None, 2)
# value of recompute.keep -> which of a module's other products, and of its attentions, are kept
KEEP: Mapping[str, tuple[slice, slice]] = {
    "matmul": (_ALL, _ALL),
    "every_second_matmul": (_EVERY_SECOND, _NONE),
    "attention": (_NONE, _ALL),
    "boxing": (_NONE, _NONE),  # tensors that communication made, so that none is repeated
}
ModuleOnStage = tuple[str, int]  # a named module on one stage
AGAIN = "/again"  # suffix of the name of a copy, and of its outputs


def recompute(graph: LogicalGraph, strategy: Strategy) -> LogicalGraph:
    """Add copies of forward ops to backward: laid_out -> signed, in part.

    Raises RecipeError for a pattern that matches no module.
    """
    if not strategy.recompute.modules:
        return graph
    recomputed = _Recomputed(graph, strategy)
    copies = recomputed.copies()
    ops = _sort_by_inputs(recomputed.in_order(copies))
    result = replace(graph, ops=ops, tensors=recomputed.tensors)
    return replace(result, notes=(*graph.notes, *_notes(graph, result, strategy, copies)))


def find_stored(graph: LogicalGraph, strategy: Strategy) -> frozenset[str]:
    """Return the tensors of forward that wait for backward, before ops have layouts; a view counts
    as its base.  What `keep: [boxing]` stores is left out, as no layout says yet what is boxed.
    """
    asked, recomputed = strategy.recompute, set[str]()
    if asked.modules:
        known = replace(asked, keep=(*{*asked.keep} - {"boxing"},))
        recomputed = _Recomputed(graph, replace(strategy, recompute=known)).wanted
    late = (op for op in graph.ops if op.phase not in (FORWARD, UPDATE))
    read = {name for op in late for name in op.inputs}
    read.update(name for made in recomputed for name in graph.producer[made].inputs)
    stored = set()
    for name in read - recomputed:
        while (op := graph.producer.get(name)) is not None and is_view(op.target):
            name = op.inputs[0]
        if op is not None and op.phase == FORWARD and name not in graph.of_weights:
            stored.add(name)
    return frozenset(stored)


class _Recomputed:
    """The tensors to recompute, and the names of their copies.

    group: op -> the named module that it belongs to.  kept_ops: products whose outputs are stored.
    wanted: tensors to recompute.
    """

    def __init__(self, graph: LogicalGraph, strategy: Strategy) -> None:
        self.graph = graph
        self.strategy = strategy
        self.tensors = dict(graph.tensors)
        self.feeds = {feed.tensor for feed in graph.feeds if not feed.per_step}
        self.group = _group_by_module(graph, strategy.recompute.modules)
        self.kept_ops = _find_kept_ops(graph, self.group, strategy.recompute.keep)
        self.backward = [op for op in graph.ops if op.phase in (BACKWARD, WEIGHT_GRAD)]
        self.wanted = self._tensors_to_recompute()
        self.held: dict[tuple[str, ModuleOnStage, NdSbp], Op] = {}

    def _tensors_to_recompute(self) -> set[str]:
        """Return forward values that backward of their own module reads, and the values they are
        made of.

        With `whole` these are all that a module makes; of views, those that are read.
        """
        wanted: set[str] = set()
        pending = [name for op in self.backward for name in op.inputs]
        if self.strategy.recompute.whole:
            made = (op for op in self.graph.ops if op.name in self.group and not is_view(op.target))
            pending += [name for op in made for name in op.makes]
        while pending:
            name = pending.pop()
            if name not in wanted and not self._is_kept(name):
                wanted.add(name)
                pending += self.graph.producer[name].inputs
        return wanted

    def _is_kept(self, name: str) -> bool:
        """Return False for tensors that can be recomputed."""
        maker = self.graph.producer.get(name)
        if maker is None or maker.phase != FORWARD or maker.name not in self.group:
            return True
        if self.graph.running.intersection(maker.inputs):
            return True  # the buffer has changed when backward runs
        if maker.name in self.kept_ops:
            return True
        if name in self.graph.of_weights and not is_view(maker.target):
            return True  # it exists all step long: hoist_weights makes it once
        group = self.group[maker.name]
        readers = self.graph.consumers.get(name, ())
        if any(self._is_outside(reader, group) for reader in readers):
            return True
        keeps = "boxing" in self.strategy.recompute.keep
        return keeps and any(self._moves(name, reader) for reader in readers)

    def _is_outside(self, reader: Op, group: ModuleOnStage) -> bool:
        """Return whether the value is stored for this reader, whatever the module does."""
        other = self.group.get(reader.name)
        return other != group and (reader.phase != FORWARD or other is not None)

    def _moves(self, name: str, reader: Op) -> bool:
        """Return whether the reader needs another layout, and bytes must move for it."""
        have = self.graph.producer[name].sbp_of(name)
        grid = self.strategy.placements[reader.stage].shape
        shape = self.graph.tensors[name].shape
        wanted = [nd for n, nd in zip(reader.inputs, reader.in_sbp, strict=True) if n == name]
        return any(step.moves for nd_sbp in wanted for step in path(have, nd_sbp, grid, shape))

    @cached_property
    def gates(self) -> dict[ModuleOnStage, tuple[str, NdSbp]]:
        """Group -> the gradient that enters it, and the layout to read it in."""
        gates: dict[ModuleOnStage, tuple[str, NdSbp]] = {}
        for op in self.backward:
            group = self.group.get(op.name)
            for name, nd_sbp in zip(op.inputs, op.in_sbp, strict=True):
                maker = self.graph.producer.get(name)
                if group is None or maker is None or maker.phase == FORWARD:
                    continue
                if self.group.get(maker.name) != group:
                    here = maker.stage == op.stage  # as made: needs no boxing, and exists sooner
                    gates.setdefault(group, (name, maker.sbp_of(name) if here else nd_sbp))
        return gates

    # ------------------------------------------------------------------ ops

    def copies(self) -> list[Op]:
        """Return a copy of every op that makes a tensor to recompute, and the flow.after ops
        they read.
        """
        copied: list[Op] = []
        for op in self.graph.ops:
            if op.phase == FORWARD and self.wanted.intersection(op.makes):
                read = zip(op.inputs, op.in_sbp, strict=True)
                copy = replace_inputs(
                    op, [self._copy_input(op, name, nd_sbp) for name, nd_sbp in read]
                )
                outputs = tuple(
                    self._copy_name(n) if n in self.wanted else None for n in op.outputs
                )
                copied.append(replace(copy, name=op.name + AGAIN, outputs=outputs, phase=BACKWARD))
        if self.strategy.recompute.whole:
            for op in (op for op in self.graph.ops if op.name in self.kept_ops):
                for name in op.makes:
                    self._copy_input(op, name, op.sbp_of(name))
        return [*self.held.values(), *copied]

    def in_order(self, copies: list[Op]) -> Iterator[Op]:
        """Yield the ops of the new graph.  With `whole` the copies of a module come together,
        before the first op that reads one of them: the last of them may have no reader.
        """
        waiting: dict[ModuleOnStage, list[Op]] = {}
        group_of = {op.name: group for (_, group, _), op in self.held.items()}
        for copy in copies if self.strategy.recompute.whole else ():
            group = group_of.get(copy.name) or self.group[copy.name.removesuffix(AGAIN)]
            waiting.setdefault(group, []).append(copy)
        for op in self.readers():
            if op.phase == BACKWARD and any(name.endswith(AGAIN) for name in op.inputs):
                yield from waiting.pop(self.group[op.name], ())
            yield op
        yield from copies

    def readers(self) -> Iterator[Op]:
        """Yield all ops of the graph; those of backward read copies."""
        joined = self._late_ops()
        for op in self.graph.ops:
            if op.phase in (BACKWARD, WEIGHT_GRAD):
                op = replace_inputs(
                    op, [self._copy_name(n) if n in self.wanted else n for n in op.inputs]
                )
            yield replace(op, phase=BACKWARD) if op.name in joined else op

    def _late_ops(self) -> set[str]:
        """Return weight gradients of the named modules, and the ops that their inputs come from."""
        joined: set[str] = set()
        needed: set[str] = set()
        made_late: set[str] = set()
        for op in reversed(self.backward):
            if op.phase == WEIGHT_GRAD and (op.name in self.group or needed.intersection(op.makes)):
                joined.add(op.name)
                needed.update(op.inputs)
                made_late.update(op.makes)
        sums = {
            op.name
            for op in self.backward
            if has(op.target, Trait.SUM) and op.inputs[0] in made_late
        }
        return joined | sums

    def _copy_name(self, name: str | None) -> str:
        assert name is not None
        copy = name + AGAIN
        self.tensors[copy] = replace(self.tensors[name], name=copy)
        return copy

    def _copy_input(self, op: Op, name: str, nd_sbp: NdSbp) -> str:
        """Return the tensor that a copy reads in place of an input of its original."""
        maker = self.graph.producer.get(name)
        group = self.group[op.name]
        if name in self.wanted:
            return self._copy_name(name)
        per_micro_batch = name in self.feeds if maker is None else maker.phase == FORWARD
        if not per_micro_batch or name in self.graph.of_weights or group not in self.gates:
            return name
        key = (name, group, nd_sbp)
        if key not in self.held:
            self.held[key] = self._after(op, name, group, nd_sbp)
        return self.held[key].makes[0]

    def _after(self, op: Op, name: str, group: ModuleOnStage, nd_sbp: NdSbp) -> Op:
        gradient, read_as = self.gates[group]
        output = f"{name}/after/{group[0]}"
        while output in self.tensors:
            output += "'"
        self.tensors[output] = replace(self.tensors[name], name=output)
        return Op(
            output,
            AFTER,
            (Ref(name), Ref(gradient)),
            (),
            outputs=(output,),
            module=op.module,
            phase=BACKWARD,
            stage=op.stage,
            in_sbp=(nd_sbp, read_as),
            out_sbp=(nd_sbp,),
            chunk=op.chunk,
        )


# ---- modules -------------------------------------------------------------------------------------


def _group_by_module(graph: LogicalGraph, patterns: tuple[str, ...]) -> dict[str, ModuleOnStage]:
    """Return op -> the outermost module around it that a pattern names, on the op's stage."""
    owners: dict[str, str | None] = {}
    used: set[str] = set()
    for module in {op.module for op in graph.ops if op.module not in ("", "loss")}:
        around = {path: [p for p in patterns if fnmatchcase(path, p)] for path in within(module)}
        used.update(*around.values())
        owners[module] = next((path for path, named in around.items() if named), None)
    for pattern in patterns:
        if pattern not in used:
            raise RecipeError(
                "recompute.modules",
                f"{pattern!r} matches no module that computes anything.",
                "Modules: " + ", ".join(sorted(owners)[:12]),
            )
    return {
        op.name: (owner, op.stage)
        for op in graph.ops
        if (owner := owners.get(op.module)) is not None
    }


def _find_kept_ops(
    graph: LogicalGraph, group: Mapping[str, ModuleOnStage], keep: Iterable[str]
) -> set[str]:
    """Return the products of the named modules whose outputs are stored."""
    products: dict[tuple[ModuleOnStage, bool], list[str]] = {}
    for op in graph.ops:
        if op.phase == FORWARD and op.name in group and has(op.target, Trait.PRODUCT):
            attends = info(op.target).cost.product is ProductKind.ATTENTION
            products.setdefault((group[op.name], attends), []).append(op.name)
    kept = (names[KEEP[k][attends]] for (_, attends), names in products.items() for k in keep)
    return {name for names in kept for name in names}


# ---- order ---------------------------------------------------------------------------------------


def _sort_by_inputs(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Put every op after the makers of its inputs; copies go right before their first reader."""
    ops = tuple(ops)
    maker = {name: op for op in ops for name in op.makes}
    done: set[str] = set()
    waiting: set[str] = set()
    out: list[Op] = []
    for last in ops:
        stack = [last]
        while stack:
            op = stack.pop()
            missing = [maker[n] for n in op.inputs if n in maker and maker[n].name not in done]
            if op.name in done:
                continue
            if not missing:
                done.add(op.name)
                out.append(op)
                continue
            assert op.name not in waiting, f"{op.name} waits for itself"
            waiting.add(op.name)
            stack += [op, *reversed(missing)]
    return tuple(out)


# ---- notes ---------------------------------------------------------------------------------------


def _notes(
    before: LogicalGraph, after: LogicalGraph, strategy: Strategy, copies: list[Op]
) -> Iterator[str]:
    """Yield a line for each stage: ops, bytes saved, bytes moved again."""
    for stage in sorted({op.stage for op in copies}):
        again = [op for op in copies if op.stage == stage and op.target != AFTER]
        stored = stored_bytes(before, strategy, stage)
        saved = stored - stored_bytes(after, strategy, stage)
        repeated = moved_bytes(after, strategy, again)
        yield (
            f"recompute: stage {stage} runs {len(again)} ops again in backward; a rank stores "
            f"{saved:,.0f} of {stored:,.0f} bytes less for a micro-batch"
            + (
                f", and {repeated:,.0f} bytes are communicated again (not so with keep: [boxing])"
                if repeated
                else ""
            )
        )
