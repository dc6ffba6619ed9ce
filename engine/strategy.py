"""Strategy: what the recipe asks of the passes, which know nothing of files, Hydra or processes.

Zero, Recompute and Auto are sections of the recipe too (launcher/recipe/schema.py), as they stand:
their docstrings are its reference, and OmegaConf, which reads classes for defaults, bears no slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrun.engine.errors import RecipeError
from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.ir.module_path import within
from flowrun.engine.ir.placement import LENGTH_AXES, Placement
from flowrun.engine.ir.sbp import NdSbp, Pinned, Sbp

if TYPE_CHECKING:  # graphs and tables of ops import torch, which composing does without
    from flowrun.engine.ir.table import OpTable


@dataclass(frozen=True, slots=True)
class Pin:
    """A line of `sbp:`.

    pattern: over parameter or module names.  where: "variable", "in" or "out".  axis: its name.
    """

    pattern: str
    where: str
    axis: str
    sbp: Sbp

    def around(self, module: str) -> str | None:
        """Return the outermost module around (or at) a path that the pattern names (fnmatch, case
        kept; `*` crosses dots).
        """
        return next((path for path in within(module) if fnmatchcase(path, self.pattern)), None)

    def names(self, *names: str) -> bool:
        """Return whether the pin is of what has such a name, or of a module that holds it."""
        return self.where == "variable" and any(map(self.around, names))

    @property
    def key(self) -> str:
        """Dotted recipe key, for errors."""
        middle = "" if self.where == "variable" else f".{self.where}"
        return f"sbp.{self.pattern}{middle}.{self.axis}"


HEADS, GATHER, RING = "heads", "gather", "ring"  # values of long_attention
BALANCED = {f"balanced_{way}": way for way in (GATHER, RING)}  # the same, with equal work
Argument = float | bool | str | tuple[float, ...] | None  # the last three: of torch's classes
Settings = tuple[tuple[str, Argument], ...]


@dataclass(frozen=True, slots=True)
class Update:
    """The rule by which a parameter changes in a step.

    name: adamw or sgd, the engine's own; any other is `function`, traced (capture/update_trace.py).
    settings: its keyword arguments; `lr` is the learning rate before any schedule.
    key: of the recipe, that asks for it.
    """

    name: str
    settings: Settings
    function: Callable[..., Any] | None = None
    key: str = "optim"

    @property
    def rate(self) -> float:
        """The learning rate before any schedule."""
        return float(dict(self.settings)["lr"])  # type: ignore[arg-type]

    @property
    def numbers(self) -> Settings:
        """The settings but `lr`, which is fed."""
        return tuple((key, value) for key, value in self.settings if key != "lr")


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters whose name matches the pattern (fnmatch, `*` crosses dots) have settings of their
    own, and perhaps an update of their own, whose `lr` is then theirs or that of all.

    frozen_until: steps that come before their first update; None: an earlier group says it.
    """

    pattern: str
    settings: Settings
    update: Update | None = None
    frozen_until: int | None = None

    def matches(self, name: str) -> bool:
        """True if a parameter belongs to the group."""
        return fnmatchcase(name, self.pattern)

    def over(self, known: Update, parameter: str) -> Update:
        """Return the update of a parameter of this group.  known: by the groups before.  Raises
        RecipeError for a setting that it does not take.
        """
        base = self.update or known
        settings = dict((*known.settings[:1], *base.settings))  # lr is the first
        for key, value in self.settings:
            if key != "lr" and key not in settings:
                raise RecipeError(
                    f"optim.groups.{self.pattern}.{key}",
                    f"the update of {parameter}, {base.name}, takes no {key!r}.",
                    f"It takes {', '.join(settings)}.",
                )
            settings[key] = value
        return replace(base, settings=tuple(settings.items()))


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The rules by which parameters change in a step.

    name, arguments, function: of the Update of all parameters that no group gives one.
    groups: settings and updates of some parameters; of several that match, the later wins, key by
        key; an update goes with all of its settings.
    rates: (lr, learning rate of each step, the last holds on) for every lr that a schedule changes.
    clip_value: largest element of a gradient, clip_norm: largest global norm of all; 0 = off.
        Values are clipped first.
    sparse: "exact": tables of look-ups are updated by rows where that equals the dense update;
        "lazy": wherever rows suffice for the optimizer; "off".
    ema: decay of an exponential moving average of each trained weight, the state "ema/<name>" that
        starts as the weight; 0 = off.
    begun: parameter -> steps before its first update, where a run was resumed that has begun it.
    """

    name: str = "adamw"
    arguments: Settings = ()
    clip_norm: float = 0.0
    clip_value: float = 0.0
    _: KW_ONLY
    groups: tuple[ParameterGroup, ...] = ()
    rates: tuple[tuple[float, tuple[float, ...]], ...] = ()
    ema: float = 0.0
    sparse: str = "exact"
    function: Callable[..., Any] | None = None
    begun: tuple[tuple[str, int], ...] = ()

    def frozen_until(self, parameter: str) -> int:
        """Return the number of steps before the first update of a parameter, by its groups."""
        given = (g.frozen_until for g in self.groups if g.matches(parameter))
        return ([0] + [steps for steps in given if steps is not None])[-1]

    def update_of(self, parameter: str) -> Update:
        """Return the update of a parameter.  Raises RecipeError for a setting of a group that it
        does not take.
        """
        found = Update(self.name, self.arguments, self.function)
        for group in self.groups:
            if group.matches(parameter):
                found = group.over(found, parameter)
        return found

    def rate_field(self, lr: float) -> str:
        """Return the name of the number that a plan is fed of a learning rate."""
        short = f"{lr:g}"
        shown = short if float(short) == lr else repr(lr)  # no two rates share a name
        return "@lr" if lr == dict(self.arguments).get("lr") else f"@lr={shown}"

    def rate(self, lr: float, step: int) -> float:
        """Learning rate at a step, counted from 0."""
        values = dict(self.rates).get(lr, (lr,))
        return values[min(step, len(values) - 1)]


@dataclass(frozen=True, slots=True)
class Kept:
    """Weights and states of the optimizer may be kept in bf16; their updates are rounded at random
    (ops/flow/rounding.py).

    weights: parameters are.  states: the optimizer's states are.  wide: patterns of parameters that
    stay as they are, with their states.  seed: of the random numbers.
    """

    weights: bool = False
    states: bool = False
    wide: tuple[str, ...] = ()
    seed: int = 0

    def narrows(self, parameter: str) -> bool:
        """True unless a pattern leaves a parameter as it is."""
        return not any(fnmatchcase(parameter, pattern) for pattern in self.wide)


@dataclass(frozen=True)
class Zero:
    """ZeRO shards tensors beyond the layout.

    axis: name of an axis; null: the one named data, dp or batch.
    stage: 0: off; 1: the optimizer's state; 2: also accumulated gradients; 3: also the weights.
    min_size: smaller parameters stay whole.
    """

    axis: str | None = None
    stage: int = 0
    min_size: int = 1024


@dataclass(frozen=True)
class Recompute:
    """Activation checkpointing: what backward computes again in place of reading it.

    modules: patterns of module paths; a pattern covers everything inside a module that it names.
    keep: classes of ops whose outputs are stored all the same: matmul (products, convolutions,
        attention), every_second_matmul (the first, third … product of a module, without attention),
        attention (one kernel), boxing (what communication makes); empty: only inputs of the modules
        are stored.
    whole: true: everything that is not stored is computed again, as Megatron-LM does, and what
        `keep` names is stored, as by torch's selective checkpointing, whether or not backward reads
        it; false: only what backward reads, as torch.utils.checkpoint does, which leaves out a
        block's last product.  Without `keep` both hold the same memory.
    """

    modules: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class Auto:
    """Flowrun decides these itself (docs/how_to/auto.md); `parallel=auto` enables it.

    enabled: search the layout of every op by its seconds, over all axes together; pins of `sbp`
        stay, unless ignore_user_sbp.
    ignore_user_sbp: ignore the pins of `sbp`.
    computation_cost_ratio: factor on compute seconds.
    wait_time: time that each boxing costs in addition to its own; null: two acts
        (hardware.act_s).
    trunk: count only the part of a boxing that simultaneous compute does not hide.
    sbp_collector: readers that ask for the same layout share one boxing.
    memory: what a held byte costs: off, slight, moderate, heavy, or adaptive (as little as
        hardware.memory_bytes allows).
    placement: search the sizes of the axes, stages, micro-batches, in_flight, ZeRO and
        recomputation together, for the fastest that memory allows
        (docs/how_to/placement_search.md).
    ranks: number of ranks to place; null: as many as `placement` has.
    keep: keys that keep the recipe's value: placement.axes, placement.stages, placement.chunks,
        placement.in_flight, train.micro_batches, zero.stage, recompute.modules, or a section.
    plans: largest number of candidates that are compiled.
    seconds: limit of a search of layouts, and of one of placements; it then ends with the best so
        far, and says how far off that may be; null: it ends by itself, always with the same.
    """

    enabled: bool = False
    ignore_user_sbp: bool = False
    computation_cost_ratio: float = 1.0
    wait_time: float | None = None
    trunk: bool = True
    sbp_collector: bool = True
    memory: str = "adaptive"
    placement: bool = False
    ranks: int | None = None
    keep: tuple[str, ...] = ()
    plans: int = 200
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """Stages to follow.  ops: (module, target, how many of these came before) -> stage.  variables:
    name -> stage.  homes: name -> nd-SBP, to follow too; pinned: as ops read it.
    """

    ops: tuple[tuple[tuple[str, str, int], int], ...]
    variables: tuple[tuple[str, int], ...]
    homes: tuple[tuple[str, NdSbp], ...] = ()
    pinned: tuple[tuple[str, Pinned], ...] = ()


@dataclass(frozen=True, slots=True)
class Preparation:
    """A step of making a sample on the host: read, decode, augment …, as the data set names it.

    seconds, num_bytes: of one sample, foreseen: time on one core, and what is left for the next
    step.
    """

    name: str
    seconds: float = 0.0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LossScale:
    """The factor of fp16 gradients (update/scale_loss.py).

    dynamic: it is halved after an overflow, and doubled after many updates without one.
    """

    start: float = 65536.0
    dynamic: bool = True


@dataclass(frozen=True, slots=True)
class OwnSchedule:
    """A schedule of the user's: a subclass of actors.schedules.Schedule, and its own fields."""

    kind: type
    settings: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class Strategy:
    """Everything that decides the layout.

    axes: names, outermost first; every stage's placement has all of them (size 1 where a stage does
        not use one).
    placements: one a stage.
    chunks: pieces of the model that each stage owns: the line of forward ops is cut into this
        many times the stages, and they take turns (an interleaved pipeline).
    stage_modules: module patterns of each stage; empty: cut by foreseen time.
    decided: stages that training chose, which evaluation follows; before stage_modules and the cut
    by time.
    mirrored: each rank its own batch (one stage, axes that divide the batch); else one logical
        batch.
    counts_step: what a loss is divided by is counted over the step (passes/count_step.py); else by
        each micro-batch for itself.
    in_flight: micro-batches that a stage may hold for backward: a number, "gpipe", "1f1b",
        another name of actors/schedules.py, or "auto", the fewest that are as good as what memory
        allows, up to zero bubble (compile.py).
    kept: which weights and states are kept in bf16.
    states_on_host: states of the optimizer lie in the host's memory; averages of weights do not.
    skips_nonfinite: an update is left out, on all ranks, unless all gradients are finite; loss
        scaling does so in any case.
    skips_alike: stages leave out the same updates, so that each waits for the gradients of all;
        False: for its own and those of earlier stages, as the run ends at such a step.
    reduce_in_fp32: gradients are summed over ranks in the dtype of their accumulators.
    accumulate_in_fp32: these have the dtype of the weights; else the one that the gradient was
        computed in.
    long_attention: what attention makes of a length that an axis divides: heads, gather, ring, one
        of BALANCED, or auto.
    expert_room: slots for tokens on the way to the ranks of their experts (ops/experts/routed.py),
        in even shares; 0: each rank sees all tokens that its experts may take.
    loss_chunks: of rows, in which a head and its loss run (passes/head_products.py).
    pads_classes: products see a multiple of 64 classes (passes/head_products.py).
    preparation: steps that make a sample, each an actor of its own; empty: samples are read at
        once.
    overwrites: results are written over what nobody reads any more; compiled code sees to that
        itself.
    blocking: axes during whose collectives nothing computes (scheduler.py).
    fusion: which chains of elementwise ops are one kernel, a name of FUSIONS (cost/fusion.py);
        "": each op is a kernel of its own.
    unprepared: fields that can be had without the rest of their samples: a stage that reads no
        other makes no samples, and has no chain of those steps.
    sample_s: of making a sample at once, foreseen: time on one core.
    signatures: op ("my::op") -> the rows that the user gives for it.
    kept_rows: the file in which rows that are found by experiment are kept; None: none is kept.
    shared_memory: all ranks exchange their messages there; hardware.link is that of such ranks.
    shares_weights: gathered weights may lie there once; not where several plans write them.
    check: graphs and plans are verified after every pass (engine/verify).
    """

    axes: tuple[str, ...]
    placements: tuple[Placement, ...]
    chunks: int = 1
    stage_modules: tuple[tuple[str, ...], ...] = ()
    _: KW_ONLY
    decided: Decided | None = None
    pins: tuple[Pin, ...] = ()
    zero: Zero = Zero()
    recompute: Recompute = Recompute()
    auto: Auto = Auto()
    optimizer: Optimizer = Optimizer()
    kept: Kept = Kept()
    states_on_host: bool = False
    loss_scale: LossScale | None = None
    skips_nonfinite: bool = False
    skips_alike: bool = True
    reduce_in_fp32: bool = False
    accumulate_in_fp32: bool = True
    micro_batches: int = 1
    mirrored: bool = False
    counts_step: bool = True
    in_flight: int | str | OwnSchedule = "auto"
    long_attention: str = "auto"
    expert_room: float = 0.0
    loss_chunks: int = 1
    pads_classes: bool = False
    register_slots: int = 2
    overwrites: bool = True
    blocking: tuple[str, ...] = ()
    fusion: str = ""
    preparation: tuple[Preparation, ...] = ()
    unprepared: tuple[str, ...] = ()
    sample_s: float = 0.0
    hardware: Hardware = field(default_factory=Hardware)
    shared_memory: bool = False
    shares_weights: bool = True
    signatures: tuple[tuple[str, OpTable], ...] = ()
    kept_rows: Path | None = None
    check: bool = False

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.placements)

    @property
    def divides_lengths(self) -> bool:
        """True if an axis of several ranks divides the length of samples."""
        axes = [k for k, name in enumerate(self.axes) if name in LENGTH_AXES]
        return any(self.parts(stage, k) > 1 for stage in range(self.num_stages) for k in axes)

    @property
    def balances(self) -> bool:
        """True if all ranks get equal work of causal attention."""
        return self.long_attention in BALANCED

    def parts(self, stage: int, axis: int) -> int:
        """Ranks along an axis in a stage."""
        return self.placements[stage].shape[axis]
