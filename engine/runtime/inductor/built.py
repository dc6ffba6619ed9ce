"""BuiltRegions: the regions of a plan as built programs.

Equal pieces are built once for all ranks of a host, before ranks are forked, which inherit the
code.  The key of a piece is a hash of its program's text, at the shapes that a rank holds, of its
inputs' shapes and strides, and of what Inductor is set to.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flowrun.engine.actors.plan import Plan, RegionWork
from flowrun.engine.actors.sums import sums_of
from flowrun.engine.errors import RunError
from flowrun.engine.runtime.inductor.graph_breaks import GraphPiece, split
from flowrun.engine.runtime.inductor.inductor import (
    TEMPLATES,
    Boxed,
    Code,
    InductorKeys,
    Spec,
    build_program,
    cache_folder,
    infer_specs,
    settings_of,
)
from flowrun.engine.runtime.kernels.kernels import Kernel, emit
from flowrun.engine.runtime.kernels.program import Program
from flowrun.engine.runtime.kernels.region_program import local_shape, region_program, regions_of


@dataclass(frozen=True, slots=True)
class BuiltPiece:
    """A piece of a region on one rank.

    specs: of its inputs.  key: equal for equal code; "" for a piece that is not built.
    """

    piece: GraphPiece
    specs: tuple[Spec, ...]
    key: str


BuiltRegion = tuple[Program, tuple[BuiltPiece, ...]]  # a region on one rank, in pieces


class BuiltRegions:
    """Kernels (kernels.py) whose regions are built.

    plan: holds the regions.  device: "cpu" or "cuda".  threads: compute threads of a rank.
    options: Inductor's.  code: key -> built code.
    """

    def __init__(self, plan: Plan, device: str, threads: int, options: InductorKeys = ()) -> None:
        self.plan = plan
        self.device = device
        self.settings = settings_of(threads, options)
        self.code: dict[str, Boxed] = {}
        self._made: dict[tuple[str, tuple[Spec, ...]], tuple[Spec, ...]] = {}
        self._regions: dict[int, Mapping[int, BuiltRegion]] = {}

    def __call__(self, plan: Plan, rank: int, device: torch.device) -> Mapping[int, Kernel]:
        """Return region actor -> kernel; build what is not built yet."""
        assert plan is self.plan, "built for another plan"
        return {
            actor: Chain(program, [(part, self.kernel(part)) for part in parts])
            for actor, (program, parts) in self.of_rank(rank).items()
        }

    @property
    def count(self) -> int:
        """The number of regions in the plan: those of one rank of each stage."""
        return sum(isinstance(actor.work, RegionWork) for actor in self.plan.actors)

    @property
    def different(self) -> Mapping[str, BuiltPiece]:
        """Key -> a piece with that key, over all ranks: the pieces to build."""
        return {
            part.key: part
            for placement in self.plan.placements
            for rank in placement.ranks
            for _, parts in self.of_rank(rank).values()
            for part in parts
            if part.key
        }

    def kernel(self, part: BuiltPiece) -> Boxed:
        """Return the code of a piece, built now or loaded from Inductor's cache on disk: of several
        processes that ask for it one builds it, and the others load it.  Raises RunError.
        """
        if not part.key:
            return emit(part.piece.program)
        if part.key not in self.code:
            program = part.piece.program
            try:
                with one_at_a_time(part.key):
                    self.code[part.key] = build_program(
                        program, part.specs, self.device, self.settings
                    )
            except Exception as error:
                raise RunError(
                    "engine.compiler",
                    f"inductor failed with {type(error).__name__}: {error}",
                    "engine.compiler=eager runs the ops one by one.",
                ) from error
        return self.code[part.key]

    # ------------------------------------------------------------------ what a rank runs

    def of_rank(self, rank: int) -> Mapping[int, BuiltRegion]:
        """Return region actor -> region.  On CUDA only ranks call this, as it opens the device."""
        if rank not in self._regions:
            self._regions[rank] = self._of_rank(rank)
        return self._regions[rank]

    def _of_rank(self, rank: int) -> dict[int, BuiltRegion]:
        """Derive strides region after region; inputs that no region makes are row-major."""
        known: dict[str, Spec] = {}
        regions = {}
        for actor, work in regions_of(self.plan, rank):
            program = region_program(self.plan, work, rank)
            given = [known.get(name) or self._row_major(name, rank) for name in work.reads]
            given += [self._row_major(name, rank) for name in sums_of(self.plan, work)]
            regions[actor], specs = self._region(program, given)
            for name, number in zip(work.makes, program.results, strict=False):
                if name not in work.accumulates or self.plan.micro_batches == 1:
                    known[name] = specs[number]
        return regions

    def _row_major(self, name: str, rank: int) -> Spec:
        return Spec.row_major(local_shape(self.plan, rank, name), self.plan.tensors[name].dtype)

    def _region(
        self, program: Program, given: Sequence[Spec]
    ) -> tuple[BuiltRegion, dict[int, Spec]]:
        """Return a region with inputs of these specs, and the specs of all its values."""
        specs = dict(enumerate(given))
        parts = []
        for piece in split(program, any(map(self.settings.get, TEMPLATES))):
            reads = tuple(specs[k] for k in piece.reads)
            text = str(piece.program)
            decides = (torch.__version__, self.device, sorted(self.settings.items()), reads)
            key = hashlib.sha256(f"{decides}\n{text}".encode()).hexdigest()[:16]
            part = BuiltPiece(piece, reads, "" if piece.plain else key)
            result_specs = self._made.get((text, reads))
            if result_specs is None:
                result_specs = self._made[text, reads] = self._result_specs(part)
            specs.update(zip(piece.makes, result_specs, strict=True))
            parts.append(part)
        return (program, tuple(parts)), specs

    def _result_specs(self, part: BuiltPiece) -> tuple[Spec, ...]:
        """Return the specs of a piece's results; on CUDA the built code decides on them."""
        if not part.piece.makes:
            return ()
        result_specs = infer_specs(part.piece.program, part.specs, self.device)
        if self.device == "cpu" or not part.key:
            return result_specs
        code = self.kernel(part)
        assert isinstance(code, Code)
        return tuple(replace(m, stride=s) for m, s in zip(result_specs, code.strides, strict=True))


def marker_folder() -> Path:
    """Return the folder of an empty file for each key in Inductor's cache, and of locks."""
    folder = cache_folder() / "flowrun"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def one_at_a_time(key: str) -> Iterator[None]:
    """Let one process of this host be in such a block for a key."""
    with (marker_folder() / f"{key}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Chain:
    """The kernel of a program in pieces; a value is dropped after the last piece that reads it."""

    def __init__(self, program: Program, parts: Sequence[tuple[BuiltPiece, Boxed]]) -> None:
        self.results = program.results
        last = {k: i for i, (part, _) in enumerate(parts) for k in part.piece.reads}
        # kernel, (input, whether it is dropped), results, strides that built code requires
        self.steps = [
            (
                kernel,
                tuple((k, last[k] == i and k not in program.results) for k in part.piece.reads),
                part.piece.makes,
                tuple(spec.stride for spec in part.specs) if part.key else (),
            )
            for i, (part, kernel) in enumerate(parts)
        ]

    def __call__(self, values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        held = dict(enumerate(values))
        values.clear()
        for kernel, reads, makes, strides in self.steps:
            inputs = [held.pop(k) if last else held[k] for k, last in reads]
            for k, stride in enumerate(strides):
                if inputs[k].stride() != stride:
                    inputs[k] = _copy_with_strides(inputs[k], stride)
            held.update(zip(makes, kernel(inputs), strict=True))
        return tuple([held[k] for k in self.results])


def _copy_with_strides(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Copy an input to the strides for which the code was built.  It is never a variable, which
    code changes in place: these are always row-major (Rank).
    """
    return value.new_empty_strided(value.shape, stride).copy_(value)
