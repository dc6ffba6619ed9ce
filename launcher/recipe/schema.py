"""The recipe's keys as dataclasses: types, defaults, units.

One set of frozen classes serves both ends: Hydra merges a recipe into `RecipeSchema` (unknown keys
and wrong types fail), and `Recipe`, the frozen, resolved result that every rank is handed, holds
the same classes, with layouts parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, TypeVar

from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.ir.placement import Placement
from flowrun.engine.strategy import Pin

Keys = TypeVar("Keys", bound=Any)
Target = dict[str, Any]  # `_target_`: dotted path of a class or function, beside its arguments

WEIGHTS = "weights"  # the one key of `model` that is no argument of it
SPARSE = ("exact", "lazy", "off")
OPTIMIZERS = ("adagrad", "adamw", "lamb", "lion", "sgd")
LAUNCHERS = ("local", "virtual", "slurm")
CLUSTERS = ("slurm", "local")
DEVICES = ("auto", "cpu", "cuda")
TRANSPORTS = ("auto", "shared", "gloo")
KEPT = ("matmul", "boxing")
MIRRORED = "mirrored"
VIEWS = ("consistent", MIRRORED)
STEP, MICRO_BATCH = "step", "micro_batch"
LOSS_MEANS = (STEP, MICRO_BATCH)
STOP, IGNORE = "stop", "ignore"
ON_NONFINITE = (STOP, IGNORE)
SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
EAGER, INDUCTOR, HANDWRITTEN = "eager", "inductor", "handwritten"
COMPILERS = (EAGER, INDUCTOR, HANDWRITTEN)
PRECISIONS = ("fp32", "bf16", "fp16")
MEMORY_MODES = ("off", "slight", "moderate", "heavy", "adaptive")
KEEPABLE = (
    "placement.axes",
    "placement.stages",
    "placement.chunks",
    "placement.in_flight",
    "train.micro_batches",
    "zero.stage",
    "recompute.modules",
)


@dataclass(frozen=True)
class Task:
    """How the batch enters the model, and what is made of its output.

    inputs: model argument -> batch field; empty: the fields that forward takes by their own names.
    loss: a partial of `_target_`, called loss(output, batch) -> scalar mean; null: the output
    itself, or its `.loss`.
    metrics: name -> a partial of `_target_`, called metric(output, batch) -> scalar mean; evaluated
    beside the validation loss.
    """

    inputs: dict[str, str] = field(default_factory=dict)
    loss: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Eval:
    """What is held out from training, and how much of it is read at the end.

    fraction: of the data set, its last samples.  batches: of one step's size.  every: steps from
    one evaluation to the next, 0 = at the end only.
    """

    fraction: float = 0.05
    batches: int = 8
    every: int = 0


@dataclass(frozen=True)
class Optim:
    """The update of the weights (docs/how_to/training.md).

    name: adamw, sgd, lion, lamb or adagrad.  update: a function of one's own instead, `_target_`
    beside its numbers.  clip_norm: largest global norm of the gradient, clip_value: largest
    element, 0 = off.  betas: adamw, lamb, lion.  eps: adamw, lamb, adagrad.  momentum, nesterov:
    sgd.  weight_decay: decoupled in adamw, lamb and lion, added to the gradient in sgd, adagrad.
    schedule: {name: a class of torch.optim.lr_scheduler, its arguments}, or a list of such with
    `steps`.  warmup_steps: linear rise before it.  groups: pattern over parameter names -> keys
    that replace those above; the later pattern wins, key by key; {frozen: true}: these parameters
    stay as they are, without gradient, state and communication.  ema: decay of a moving average of
    the weights, 0 = off.  ema_eval: evaluation reads the averages.  sparse: tables of look-ups are
    updated by rows where that equals the dense update (exact), wherever the recipe's optimizer can
    (lazy), or not (off).
    """

    name: str = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    clip_norm: float = 0.0
    clip_value: float = 0.0
    schedule: Any = None
    warmup_steps: int = 0
    groups: dict[str, Any] = field(default_factory=dict)
    ema: float = 0.0
    ema_eval: bool = True
    sparse: str = "exact"
    update: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlacementSchema:
    """Where it runs: ranks = stages x product of the axes.

    axes: name -> number of ranks, outermost first; a size of 1 is as if absent.
    stages: a number, or a list of {modules: [patterns], ranks: nested list, one level an axis}.
    chunks: pieces of the model that each stage owns; of more than one the stages take turns along
    the model (an interleaved pipeline): the bubble is so many times shorter, the messages so many
    times more.
    in_flight: micro-batches that a stage may hold for backward: a number, gpipe, 1f1b, zero_bubble,
    or null (the fewest that are as good, within 1 %, as what memory allows, up to zero_bubble).
    """

    axes: dict[str, int] = field(default_factory=dict)
    stages: Any = 1
    chunks: int = 1
    in_flight: int | str | None = None


@dataclass(frozen=True)
class Zero:
    """What is sharded beyond the layout.

    axis: name of an axis; null: the one named data, dp or batch.  stage: 0 off, 1 the optimizer's
    state, 2 also accumulated gradients, 3 also the weights.  min_size: elements; smaller parameters
    stay whole.
    """

    axis: str | None = None
    stage: int = 0
    min_size: int = 1024


@dataclass(frozen=True)
class Recompute:
    """Activation checkpointing: what backward computes again instead of reading what was stored.

    modules: patterns of module paths; a pattern covers what is inside a module that it names.
    keep: classes of ops of these modules whose outputs are stored all the same: matmul (products,
    convolutions, attention), boxing (what communication makes); empty: only what enters a module.
    whole: all that is not stored is computed again, as torch.utils.checkpoint does; else what
    backward reads.
    """

    modules: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)
    whole: bool = False


@dataclass(frozen=True)
class Precision:
    """What the model computes in.  Weights, gradients and optimizer state are fp32 all the same.

    dtype: fp32, or bf16 or fp16: that of torch.autocast, in training and evaluation.  loss_scale:
    fp16 only: dynamic (as torch.amp.GradScaler, and what null stands for), or a number that stays.
    reduce_dtype: fp32: gradients are summed over ranks in fp32, as DistributedDataParallel does
    under autocast; null: in the dtype that they were computed in, as FSDP does, until accumulated.
    accumulate_dtype: fp32: micro-batches are added up in it; null: in the dtype that they were
    computed in, as Megatron-LM does in fp16, and reduced in it too.
    """

    dtype: str = "fp32"
    loss_scale: int | float | str | None = None
    reduce_dtype: str | None = None
    accumulate_dtype: str | None = "fp32"


@dataclass(frozen=True)
class Auto:
    """What flowrun decides itself (docs/how_to/auto.md); `parallel=auto` enables it.

    enabled: the layout of every op by its seconds, over all axes together; pins of `sbp` stay,
    unless ignore_user_sbp.  computation_cost_ratio: compute seconds count so many times.
    wait_time: seconds that a boxing adds beside its own; null: two acts (hardware.act_s).
    trunk: a boxing costs what compute beside it does not hide.  sbp_collector: readers that ask for
    the same share a boxing.  memory: what a held byte costs: off, slight, moderate, heavy, or
    adaptive (as little as hardware.memory_bytes allows).
    placement: sizes of the axes, stages, micro-batches, in_flight, ZeRO and recomputation, all
    together: the fastest that memory allows (docs/how_to/placement_search.md).
    ranks: to be placed; null: as many as `placement` has.
    keep: keys that stay as the recipe has them, of KEEPABLE or sections of these.
    plans: most candidates that are compiled.
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
    keep: list[str] = field(default_factory=list)
    plans: int = 200


@dataclass(frozen=True)
class Train:
    """How long and on how much.

    batch_size: samples of one step, over all ranks and micro-batches.  seed: of weights, of
    sampling and of dropout.  save: write the trained weights to the run's folder.  save_every:
    steps from one checkpoint to the next (and one at the end), 0 = none.  keep: the newest that
    stay, 0 = all.  loss_mean: step: the loss of a step is that of its whole batch, whatever
    the number of micro-batches (docs/how_to/training.md); micro_batch: the mean of the losses of
    micro-batches, as loops that accumulate gradients have it, and as the mirrored view always has.
    on_nonfinite: stop: a loss or a gradient that is not finite ends the run before it is saved;
    ignore: it goes on.
    """

    batch_size: int = 32
    micro_batches: int = 1
    steps: int = 100
    seed: int = 0
    save: bool = True
    save_every: int = 0
    keep: int = 2
    loss_mean: str = "step"
    on_nonfinite: str = "stop"


@dataclass(frozen=True)
class Slurm:
    """A batch job, one task a node (launch=slurm).

    cluster: slurm; local: the job runs on this host, with a task for each of launch.nnodes, to
    try it.  minutes: of wall clock; warning_s before its end the job goes back into the queue.
    cpus_per_node, gpus_per_node: null: what the ranks of a node need.  setup: shell lines that run
    before the tasks.  extra: more flags of sbatch.  wait: for the job's end, and report it.
    """

    cluster: str = "slurm"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    minutes: int = 60
    warning_s: int = 120
    cpus_per_node: int | None = None
    gpus_per_node: int | None = None
    mem_gb: float | None = None
    setup: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    wait: bool = False


@dataclass(frozen=True)
class Launch:
    """What runs the ranks.

    name: local (processes), virtual (all ranks in this process) or slurm (a batch job).
    threads: of one rank's compute.
    nnodes, node_rank, rdzv_endpoint: several hosts; the same command on each, rdzv_endpoint =
    host:port of one of them.  device: cpu, cuda, or auto (cuda where the
    host has a GPU for each of its ranks).
    transport: between ranks on CPUs: gloo, shared (memory, on one host), or auto (shared within a
    host, gloo between hosts).
    message_order_seed: virtual only; deliver messages in random order.
    """

    name: str = "local"
    nnodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str = ""
    device: str = "auto"
    threads: int = 1
    transport: str = "auto"
    message_order_seed: int | None = None
    slurm: Slurm = field(default_factory=Slurm)


@dataclass(frozen=True)
class Engine:
    """How the plan is made and run.

    register_slots: of what readers and boxings make, 2 = one ahead.
    check_capture: before the first step what was captured is compared with the model itself, which
    plain torch calls on two micro-batches; a large model is not.
    trace: write trace.json, what every rank did in the last 10 steps, or in so many; false: none.
    cache: keep plans, and take one that was made before of the same captured model and strategy.
    overwrites: op after op, results are written over what nobody reads any more.
    keeps_logits: cross entropy keeps logits and one number a row for backward; else
    log-probabilities, as torch does.
    blocking: axes whose collectives nothing computes beside, as on the stream of compute: what
    overlap gives, is what this takes.
    compiler: of training's regions: eager (op after op) or inductor (fused C++ or Triton code, made
    before the first step and kept on disk; evaluation stays eager); handwritten: kernels of Apex
    and Megatron-LM (cost/fusion.py), to plan with alone.
    cuda_graphs: each region of training is one launch; what regions make keeps its memory between
    steps.
    check: the model's own asserts on tensors run with every micro-batch, F.one_hot's and
    torch.linalg's among them; else they are left out, and a note of the plan names them.
    """

    register_slots: int = 2
    overwrites: bool = True
    keeps_logits: bool = True
    blocking: list[str] = field(default_factory=list)
    compiler: str = EAGER
    cuda_graphs: bool = False
    cache: bool = True
    check_capture: bool = True
    trace: bool | int = False
    check: bool = False

    @property
    def traced_steps(self) -> int:
        """Steps that are recorded."""
        return 10 if self.trace is True else int(self.trace)


@dataclass(frozen=True)
class RecipeSchema:
    """What a recipe file may say.

    model: beside `_target_` and its arguments, `weights`: a file of weights, or a folder of Hugging
    Face's, that training starts from.
    sbp: pattern over parameter or module names -> axis -> SBP, or -> in, out -> axis -> SBP.
    signatures: an op of one's own, "my::op" -> {_target_: a function of its rows, local: one of
    what a rank runs, flops or seconds: one of its cost} (docs/how_to/signatures.md).
    view: consistent (one logical batch, the numbers of one device) or mirrored (each rank its own
    batch and its own batch norm statistics; gradients averaged; results of each rank as a list).
    """

    name: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    task: Task = field(default_factory=Task)
    data: dict[str, Any] = field(default_factory=dict)
    eval: Eval = field(default_factory=Eval)
    optim: Optim = field(default_factory=Optim)
    placement: PlacementSchema = field(default_factory=PlacementSchema)
    sbp: dict[str, Any] = field(default_factory=dict)
    signatures: dict[str, Any] = field(default_factory=dict)
    view: str = VIEWS[0]
    zero: Zero = field(default_factory=Zero)
    recompute: Recompute = field(default_factory=Recompute)
    auto: Auto = field(default_factory=Auto)
    precision: Precision = field(default_factory=Precision)
    train: Train = field(default_factory=Train)
    launch: Launch = field(default_factory=Launch)
    engine: Engine = field(default_factory=Engine)
    hardware: Hardware = field(default_factory=Hardware)


def changed(tree: Keys, keys: Mapping[str, Any]) -> Keys:
    """The same with some keys, nested, set as a recipe merged over it would: key by key, in dicts
    too.  keys: of the types that the schema asks for.
    """
    given = {}
    for key, value in keys.items():
        before = getattr(tree, key)
        if is_dataclass(before):
            value = changed(before, value)
        elif isinstance(before, dict):
            value = before | value
        given[key] = value
    return replace(tree, **given)


@dataclass(frozen=True)
class Stage:
    """What one group of ranks owns.

    modules: patterns of module paths; empty: cut by foreseen time.  placement: the recipe's axes,
    with the sizes of this stage.
    """

    modules: tuple[str, ...]
    placement: Placement


@dataclass(frozen=True)
class Recipe:
    """A recipe, composed, checked and resolved.  Picklable; equal by value.

    axes: names whose size is over 1 in some stage, outermost first; every stage's placement has
    exactly these.
    signatures: as in RecipeSchema.
    pins: the lines of `sbp`; those of other axes are left out.  text: the resolved recipe as YAML;
    empty of a candidate that is only planned.
    """

    name: str
    model: Target
    weights: str
    task: Task
    data: Target
    eval: Eval
    optim: Optim
    axes: tuple[str, ...]
    stages: tuple[Stage, ...]
    chunks: int
    in_flight: int | str
    pins: tuple[Pin, ...]
    signatures: dict[str, Any]
    view: str
    zero: Zero
    recompute: Recompute
    auto: Auto
    precision: Precision
    train: Train
    launch: Launch
    engine: Engine
    hardware: Hardware
    text: str = field(default="", repr=False, compare=False)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One grid of ranks a stage."""
        return tuple(stage.placement for stage in self.stages)

    @property
    def stage_modules(self) -> tuple[tuple[str, ...], ...]:
        """Patterns of each stage; empty where the compiler is to cut."""
        listed = tuple(stage.modules for stage in self.stages)
        return listed if any(listed) else ()

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages together."""
        return sum(len(placement.ranks) for placement in self.placements)

    @property
    def placed_ranks(self) -> int:
        """That auto.placement places."""
        return self.auto.ranks or self.num_ranks

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch, over all ranks."""
        return self.train.batch_size // self.train.micro_batches

    def to_yaml(self) -> str:
        """The resolved recipe; `recipe=that_file.yaml` composes to the same recipe."""
        return self.text


def plain(value: Any) -> Any:
    """Nested mappings and sequences as dicts and lists: what YAML and errors print."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
