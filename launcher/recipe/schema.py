"""The recipe's keys as dataclasses: types, defaults, units.

One set of frozen classes serves both ends: Hydra merges a recipe into `RecipeSchema` (unknown keys
and wrong types fail), and `Recipe`, the frozen, resolved result that every rank is handed, holds
the same classes, with layouts parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowrun.engine.hardware.hardware import Hardware
from flowrun.engine.strategy import BALANCED, GATHER, HEADS, RING, Auto, Recompute, Zero

TARGET = "_target_"
Target = dict[str, Any]  # `_target_`: dotted path of a class or function, and its arguments

STORE = "train.store"
WEIGHTS = "weights"  # the one key of `model` that is no argument of it
OF_BATCHES = ("order", "collate")  # keys of `data` that are none: which samples, and how stacked
BUCKETS = "buckets"  # another: lengths of batches
KEPT = ("matmul", "every_second_matmul", "attention", "boxing")
MIRRORED = "mirrored"
STEP, MICRO_BATCH = "step", "micro_batch"
STOP, SKIP, ROLLBACK, IGNORE = "stop", "skip", "rollback", "ignore"
NEVER, AUTO, ALWAYS = "never", "auto", "always"
OBJECTIVES = ("loss", "step_s", "tokens_per_s")  # and VALIDATION with a name
VALIDATION = "validation."
SCHEDULES = ("gpipe", "1f1b", "zero_bubble", "v_zero_bubble", "v_half", "v_min")
FP32, BF16, KEEP_DTYPE = "fp32", "bf16", "model"
NARROW = "narrow"
EAGER, INDUCTOR, HANDWRITTEN = "eager", "inductor", "handwritten"
ROWWISE, TENSORWISE = "rowwise", "tensorwise"
DEVICE, HOST = "device", "host"
FUSED, PRODUCTS = "fused", "products"
KEEPABLE = (
    "placement.axes",
    "placement.stages",
    "placement.chunks",
    "placement.in_flight",
    "train.micro_batches",
    "zero.stage",
    "recompute.modules",
)
# optim.name, of which there is a file in conf/optim -> class or function that updates weights
OPTIMIZERS: Mapping[str, str] = {
    "adagrad": "flowrun.models.optimizers.adagrad",
    "adamw": "torch.optim.AdamW",
    "lamb": "flowrun.models.optimizers.lamb",
    "lion": "flowrun.models.optimizers.lion",
    "sgd": "torch.optim.SGD",
}
# keys of optim that are numbers of an optimizer: arguments of optim._target_, where there is one
ARGUMENTS = ("betas", "eps", "weight_decay", "momentum", "nesterov")
# key, with * for what is inside a list, that holds a word -> the words that it may be
CHOICES: Mapping[str, tuple[str, ...]] = {
    "view": ("consistent", MIRRORED),
    "optim.name": tuple(OPTIMIZERS),
    "optim.sparse": ("exact", "lazy", "off"),
    "train.loss_mean": (STEP, MICRO_BATCH),
    "train.on_nonfinite": (STOP, SKIP, ROLLBACK, IGNORE),
    "train.resume": (NEVER, AUTO),
    "auto.memory": ("off", "slight", "moderate", "heavy", "adaptive"),
    "auto.keep.*": (*KEEPABLE, *dict.fromkeys(key.partition(".")[0] for key in KEEPABLE)),
    "placement.in_flight": SCHEDULES,
    "placement.states": (DEVICE, HOST),
    "precision.loss_scale": ("dynamic",),
    "recompute.keep.*": KEPT,
    "precision.dtype": ("fp32", "bf16", "fp16"),
    "precision.reduce_dtype": ("fp32", "null"),
    "precision.accumulate_dtype": ("fp32", "null"),
    "precision.residual": (NARROW, FP32),
    "precision.param_dtype": (FP32, BF16, KEEP_DTYPE),
    "precision.state_dtype": (FP32, BF16),
    "precision.attention": (AUTO, FP32, NARROW),
    "precision.fp8.recipe": (ROWWISE, TENSORWISE),
    "hardware.device": ("cpu", "cuda"),
    "launch.name": ("local", "virtual", "slurm", "ray"),
    "launch.device": ("auto", "cpu", "cuda"),
    "launch.transport": ("auto", "shared", "gloo"),
    "launch.slurm.cluster": ("slurm", "local"),
    "engine.compiler": (EAGER, INDUCTOR, HANDWRITTEN),
    "engine.attention": (FUSED, PRODUCTS),
    "engine.long_attention": (AUTO, HEADS, GATHER, RING, *BALANCED),
    "engine.pad_classes": (AUTO, ALWAYS, NEVER),
}


# The engine's Task (capture.py) holds what is made of these: a module, tensors and functions, which
# OmegaConf cannot hold.
@dataclass(frozen=True)
class TaskKeys:
    """A task says how the batch enters the model, and what is computed from its output.

    inputs: model argument -> batch field; empty: forward takes the fields by their own names.
    loss: `_target_` of a function or a module, called loss(output, batch) -> scalar mean; null: the
        output itself, or its `.loss`.
    metrics: name -> `_target_` of a function, called metric(output, batch) -> scalar mean, or rows
        of samples, of all of which its `of_rows` makes a number; evaluated together with the
        validation loss.  null leaves one out.
    """

    inputs: dict[str, str] = field(default_factory=dict)
    loss: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Eval:
    """The samples that are held out from training, and how many of them an evaluation reads.

    fraction: share of the data set that is held out: its last samples.
    batches: how many batches an evaluation reads, each as large as that of a step.
    every: steps from one evaluation to the next; 0: at the end only.
    sample: a run that trained on text ends with a few lines that its model writes
        (docs/how_to/sample.md).
    """

    fraction: float = 0.05
    batches: int = 8
    every: int = 0
    sample: bool = True


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The update of the weights (docs/how_to/training.md).

    `_target_: torch.optim.RMSprop`, with its arguments next to it, takes the place of `name`.

    name: adamw, sgd, lion, lamb or adagrad.
    lr: learning rate, before warm-up and schedule.
    betas: decay rates of the two moments: adamw, lamb, lion.
    eps: added to the denominator: adamw, lamb, adagrad.
    weight_decay: decoupled in adamw, lamb and lion; added to the gradient in sgd and adagrad.
    momentum: sgd.
    nesterov: sgd.
    clip_norm: largest global norm of the gradient; 0: off.
    clip_value: largest absolute value of an element of the gradient; 0: off.
    schedule: {name: a class of torch.optim.lr_scheduler, its arguments}, or a list of these with
        `steps`.
    warmup_steps: steps of a linear rise from 0 to lr, before the schedule.
    groups: pattern over parameter names -> keys that replace those above; the later pattern wins,
        key by key; {frozen: true}: these parameters stay as they are, without gradient, state and
        communication; {frozen: false}: these are trained, though `adapters` froze the model;
        `update`: as below, of these parameters.
    ema: decay of an exponential moving average of the weights; 0: off.
    ema_eval: evaluation reads the averages.
    sparse: exact: look-up tables are updated by rows where that equals the dense update; lazy:
        wherever the optimizer can; off: never.
    update: what `_target_` and its arguments are read to.
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


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """LoRA: the model's parameters are frozen, and each linear that is named gets a product of two
    narrow matrices, which are trained (docs/how_to/fine_tuning.md).

    rank: rows of A and columns of B.
    alpha: what A and B add counts alpha / rank.
    modules: patterns over module names; each is an nn.Linear, or a Conv1D of transformers; empty:
        no adapters.
    dropout: share of the inputs of an adapter that are zeroed in training.
    """

    rank: int = 8
    alpha: float = 8.0
    modules: tuple[str, ...] = ()
    dropout: float = 0.0


@dataclass(frozen=True)
class PlacementSchema:
    """A placement says where the training runs: ranks = stages x product of the axes.

    axes: axis name -> number of ranks, outermost first; an axis of size 1 has no effect.
    stages: a number, or a list of {modules: [patterns], ranks: nested list, one level an axis}.
    chunks: pieces of the model on each stage; with several, the stages take turns along the model
        (an interleaved pipeline): a bubble shorter by this factor, more messages by this factor.
    in_flight: micro-batches that a stage may hold for backward: a number, gpipe, 1f1b, zero_bubble,
        v_zero_bubble, v_half, v_min (these go down the stages and up again, by two chunks), or null
        (the fewest that are within 1 % of the fastest that memory allows, up to zero_bubble).
    schedule: in place of in_flight: `_target_` of a schedule of your own, a class derived from
        flowrun.engine.actors.schedules.Schedule, with its fields (docs/how_to/pipelines.md).
    states: where states of the optimizer lie: device, or host: copied to the device, block by
        block, while the step is updated, and back (docs/how_to/memory.md).
    """

    axes: dict[str, int] = field(default_factory=dict)
    stages: Any = 1
    chunks: int = 1
    in_flight: int | str | None = None
    schedule: Target = field(default_factory=dict)
    states: str = DEVICE


@dataclass(frozen=True)
class Fp8:
    """Products of 8 bits in linear layers, forward and backward (docs/how_to/precision.md).

    modules: patterns over module names; a pattern covers all nn.Linear inside a module.
    recipe: rowwise: each row of an operand has a scale, and all are e4m3; tensorwise: each operand
        has one, and gradients are e5m2.
    """

    modules: tuple[str, ...] = ()
    recipe: str = ROWWISE


@dataclass(frozen=True)
class Precision:
    """The dtypes that the model computes in, and that weights and optimizer states are kept in.

    dtype: fp32, bf16 or fp16; bf16 and fp16 apply torch.autocast, in training and evaluation.
    residual: narrow: under autocast what a model looks up has that dtype, and so have sums between
        its blocks, as under FSDP and in Megatron-LM; fp32: as autocast alone leaves them.
    loss_scale: fp16 only: dynamic (as torch.amp.GradScaler; null means the same), or a constant.
    reduce_dtype: fp32: gradients are summed over ranks in fp32, as DistributedDataParallel does
        under autocast; null: in the dtype that they were computed in, as FSDP does, until they are
        accumulated.
    accumulate_dtype: fp32: gradients of micro-batches are summed in fp32; null: in the dtype that
        they were computed in, as Megatron-LM does in fp16, and they are reduced in it too.
    param_dtype: fp32: weights that train are kept in fp32, also where the model makes them in bf16
        or fp16, unless forward fails so; bf16: those of fp32 are kept in bf16, also frozen ones,
        and updates are computed in fp32 and rounded at random; model: each in the dtype that the
        model makes it in, and updates of narrow ones are rounded to nearest.
    state_dtype: bf16: states of the optimizer are kept in bf16 and rounded so, too.
    attention: of attention in bf16 or fp16 that is not one op (it has dropout, or engine.attention
        is products): fp32: its products are, as on torch's CPU; narrow: in the dtype of its inputs,
        as kernels of GPUs do; auto: by the device of the hardware profile.
    keep_fp32: patterns over names of parameters that neither of the two holds for.
    fp8: linear layers whose products are of 8 bits.
    """

    dtype: str = "fp32"
    residual: str = NARROW
    loss_scale: int | float | str | None = None
    reduce_dtype: str | None = None
    accumulate_dtype: str | None = "fp32"
    param_dtype: str = FP32
    state_dtype: str = FP32
    attention: str = AUTO
    keep_fp32: tuple[str, ...] = ()
    fp8: Fp8 = field(default_factory=Fp8)


@dataclass(frozen=True, kw_only=True)
class Train:
    """The training: its length and its amount of data.

    batch_size: samples of one step, over all ranks and micro-batches.
    micro_batches: parts of the batch that pass the model one after the other.
    steps: number of steps.
    epochs: passes over the samples that are not held out, which count in place of `steps`; 0: the
        steps count.
    seed: of weights, of sampling and of dropout.
    save: write the trained weights to the run's folder.
    save_every: steps from one checkpoint to the next, and one at the end; 0: none.
    save_aside: training continues while a checkpoint is written from a copy in memory; false: it
        waits, and takes no memory.
    log_every: steps from one line of the output to the next where it is no terminal; 0: a line for
        each tenth of the run, and every 10 s to 60 s.
    keep: number of newest checkpoints that stay; 0: all.
    store: URL under which the run's folder is kept, too, such as s3://bucket/runs/gpt, by the
        driver of fsspec that is installed; empty: nowhere (docs/how_to/checkpoints.md).
    keep_best: name of a validation result; the checkpoint where it is lowest stays, too; -NAME:
        where it is highest.  Each checkpoint is then evaluated first.
    snapshot_every: steps from one copy of the ranks' variables in the launcher's memory to the
        next, for launch.restarts on one host; null: 1 where memory allows; 0: none.
    loss_mean: step: the loss of a step is that of its whole batch, for any number of micro-batches
        (docs/how_to/training.md); micro_batch: the mean of the losses of the micro-batches, as
        loops that accumulate gradients compute it; the mirrored view always uses it.
    on_nonfinite: what follows a step with a gradient that is not finite, whose update is left out:
        stop: the run ends and says where it arose; skip: the run continues, and counts such steps;
        rollback: it continues after that step with the weights of the newest checkpoint; ignore:
        nothing is looked for, and such numbers enter the weights.
    resume: auto: where the run's folder has a checkpoint, go on from the newest whole one, so that
        the same command may be given again; never: such a folder is refused.
    """

    batch_size: int = 32
    micro_batches: int = 1
    steps: int = 100
    epochs: float = 0.0
    seed: int = 0
    save: bool = True
    save_every: int = 0
    save_aside: bool = True
    log_every: int = 0
    keep: int = 2
    store: str = ""
    keep_best: str = ""
    snapshot_every: int | None = None
    loss_mean: str = "step"
    on_nonfinite: str = "stop"
    resume: str = NEVER


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """A batch job with one task a node (launch=slurm).

    cluster: slurm; local: the job runs on this host, with one task for each of launch.nnodes, to
        try it.
    partition, account, qos: passed to sbatch.
    minutes: wall clock time of the job.
    warning_s: time before the job's end at which it returns to the queue.
    cpus_per_node, gpus_per_node: null: what the ranks of a node need.
    mem_gb: memory of a node; null: the cluster's default.
    setup: shell lines that run before the tasks.
    extra: more flags of sbatch.
    wait: wait for the job's end and report it.
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
class RayKeys:
    """Hosts on the nodes of a Ray cluster (launch=ray).

    address: of the cluster: HOST:PORT, auto (RAY_ADDRESS, or the cluster that this machine is in),
        or local (one of this machine alone, for this command).
    resources: more of what a host needs, or in place of it: {CPU: 8, GPU: 4, memory: 64e9}.
    """

    address: str = AUTO
    resources: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The launcher that runs the ranks.

    name: local (processes), virtual (all ranks in this process), slurm (a batch job) or ray
        (actors of a cluster).
    nnodes: number of hosts, each of which runs the same command; "MIN:MAX": hosts may join and
        leave while the run goes on; "2:2": a host that is lost may come again; null: as many as
        Slurm, torchrun, MPI … started (docs/how_to/platforms.md), else 1.
    node_rank: number of this host; null: the platform, or the rendezvous decides.
    rdzv_endpoint: host:port of one of the hosts, where all of them meet, or several with spaces
        between, the next where the first does not come; empty: the platform's.
    join_s: seconds that a host waits for the others.
    device: cpu, cuda, or auto (cuda if the host has a GPU for each of its ranks).
    threads: compute threads of one rank.
    data_workers: processes of each rank that make its samples, ahead of the step; 0: it makes them
        in threads of its own (docs/how_to/data.md).
    transport: between ranks on CPUs: gloo, shared (memory, on one host), or auto (shared within a
        host, gloo between hosts).
    message_order_seed: virtual only: deliver messages in the random order of this seed.
    restarts: how often failed ranks restart without a new step, before the run ends; 0: never.
    min_ranks: where restarts do not help, the run continues with fewer ranks in another layout, but
        no fewer than these; null: it ends.
    hang_s: seconds without an act of any rank after which the run ends, and says which rank owes
        what; null: 60, 20 foreseen steps, or 3 times the longest that anything took so far; 0:
        never.
    time_limit: minutes, or "HH:MM:SS", after which the run finishes its step, saves and ends with
        status 75; null: none.
    grace_s: seconds that a run which was asked to end may take to finish its step and save.
    monitor: where a process of its own answers /metrics (for Prometheus) and /healthz: a port
        of this host alone, "0.0.0.0:9400" for other hosts, too, or "unix:PATH"; null: nowhere.
    slurm: the batch job.
    ray: the cluster.
    """

    name: str = "local"
    nnodes: int | str | None = None
    node_rank: int | None = None
    rdzv_endpoint: str = ""
    join_s: float = 600.0
    device: str = "auto"
    threads: int = 1
    data_workers: int = 0
    transport: str = "auto"
    message_order_seed: int | None = None
    restarts: int = 0
    min_ranks: int | None = None
    hang_s: float | None = None
    time_limit: int | float | str | None = None
    grace_s: float = 120.0
    monitor: int | str | None = None
    slurm: Slurm = field(default_factory=Slurm)
    ray: RayKeys = field(default_factory=RayKeys)

    @property
    def num_hosts(self) -> int:
        """Hosts that the placement is for: the most that there may be."""
        return nodes_of(self).most


@dataclass(frozen=True)
class Nodes:
    """How many hosts a run may have: from `fewest` to `most`.

    may_change: hosts may join and leave; where there must be as many as there may be, those that
    are left wait for another.
    """

    fewest: int
    most: int
    may_change: bool

    def __str__(self) -> str:
        return f"{self.fewest}:{self.most}" if self.may_change else f"{self.most}"


def nodes_of(launch: Launch) -> Nodes:
    """Return `launch.nnodes`.  Raises ValueError for a text that is not MIN:MAX."""
    fewest, colon, most = str(1 if launch.nnodes is None else launch.nnodes).partition(":")
    found = Nodes(int(fewest), int(most if colon else fewest), bool(colon))
    if not 0 < found.fewest <= found.most:
        raise ValueError(launch.nnodes)
    return found


def time_limit_s(launch: Launch) -> float | None:
    """Return `launch.time_limit` in seconds.  Raises ValueError for a text that is no time."""
    limit = launch.time_limit
    if not isinstance(limit, str):
        return None if limit is None else 60.0 * limit
    hours, minutes, seconds = map(int, limit.split(":"))
    if not (hours >= 0 and 0 <= minutes < 60 and 0 <= seconds < 60):
        raise ValueError(limit)
    return 3600.0 * hours + 60 * minutes + seconds


def monitor_address(launch: Launch) -> tuple[str, int] | str | None:
    """Return `launch.monitor` as host and port, or as the path of a socket; None: there is none.

    Raises ValueError for another text.
    """
    return None if launch.monitor is None else read_address(str(launch.monitor))


def read_address(text: str) -> tuple[str, int] | str:
    """Return what PORT, HOST:PORT or unix:PATH names; a port alone is one of this host for itself.
    Raises ValueError.
    """
    scheme, colon, path = text.partition("unix:")
    if colon and not scheme and path:
        return path
    host, _, port = text.rpartition(":")
    if not 0 <= int(port) < 1 << 16:
        raise ValueError(text)
    return host.strip("[]") or "127.0.0.1", int(port)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The engine makes and runs the plan.

    register_slots: slots of registers of micro-batches that are no stash; 2: one version ahead.
    overwrites: write results over buffers that nobody reads any more, op by op.
    keeps_logits: cross entropy keeps logits and one number a row for backward; false: it keeps
        log-probabilities, as torch does.
    loss_chunks: chunks of rows (tokens of a micro-batch) in which a linear head and its cross
        entropy run, so that logits are never whole; backward multiplies again.
    pad_classes: products around a cross entropy see a multiple of 64 classes, so that rows of
        logits are aligned: always, never, or auto: built code on GPUs; where it adds at most a
        sixteenth.
    attention: fused: one op wherever it has no dropout; products: two products and a softmax, as
        software before fused kernels (attention within packed documents stays one op).
    long_attention: what attention makes of a length that an axis (context, cp) divides: heads: each
        rank has some of the heads and all tokens, by all-to-alls; gather: its own queries, and all
        keys and values; ring: its own queries, while keys and values go around; balanced_gather,
        balanced_ring: the same, but half of the queries change ranks on the way into causal
        attention and out of it, so that all ranks have equal work; auto: the fastest.
    expert_room: where an axis divides tokens and experts without capacity, tokens may travel by
        all-to-all to the ranks of the experts that they choose. For each of these ranks a rank has
        as many slots as this number says, in even shares of its tokens' choices; the run ends if
        they are too few, which the number of ranks never are. 0: ranks gather all tokens, and what
        their experts make is summed.
    blocking: axes whose collectives take turns with compute, as on one stream; this shows what
        overlap gains.  (On a GPU no host waits for those of micro-batches, with or without it.)
    compiler: of training's regions: eager (op after op) or inductor (fused C++ or Triton code,
        compiled before the first step and kept on disk; evaluation stays eager); handwritten: the
        kernels of Apex and Megatron-LM (cost/fusion.py), for planning only.
    inductor: settings by their names in torch._inductor.config: {max_autotune: true} tries kernels
        of products that compute bias and activation, too.
    cache: keep plans on disk, and reuse the plan of an equal model and strategy.
    check_capture: before the first step, compare the captured graph with the model itself on two
        micro-batches; a large model is not compared.
    verify_every: steps from one comparison to the next of what several ranks hold, which must be
        the same bytes: a rank that computes or stores wrong ends the run; 0: none.
    trace: write trace.json with every rank's last 10 steps, or a number of steps; false: none.
    check: verify the graph and the plan after every pass of the compiler (engine/verify), and run
        the model's own asserts on tensors with every micro-batch, those of F.one_hot and
        torch.linalg included; false: asserts are left out, and a note of the plan names them.
    """

    register_slots: int = 2
    overwrites: bool = True
    keeps_logits: bool = True
    loss_chunks: int = 1
    pad_classes: str = AUTO
    attention: str = FUSED
    long_attention: str = AUTO
    expert_room: float = 0.0
    blocking: list[str] = field(default_factory=list)
    compiler: str = EAGER
    inductor: dict[str, Any] = field(default_factory=dict)
    cache: bool = True
    check_capture: bool = True
    verify_every: int = 0
    trace: bool | int = False
    check: bool = False

    @property
    def traced_steps(self) -> int:
        """Steps that are recorded."""
        return 10 if self.trace is True else int(self.trace)


@dataclass(frozen=True)
class SweepKeys:
    """The number that a job of a sweep returns to Hydra's sweeper (docs/how_to/sweeps.md).

    objective: loss (of the last step), step_s, tokens_per_s, or validation.NAME (validation.loss,
        or a metric of the task); empty: none.
    """

    objective: str = ""


@dataclass(frozen=True, kw_only=True)
class RecipeSchema:
    """The keys of a recipe file.

    name: name of the run, part of its folder's name; empty: the recipe's.
    model: `_target_` with its arguments; `weights`: a file of weights, or a folder of Hugging Face,
        that training starts from.
    adapters: LoRA around named linears of a model that is frozen.
    task: inputs, loss and metrics.
    data: `_target_` of a map-style data set, with its arguments; `order`: {_target_: function of
        (seed, epoch, numbers), the indices of samples}; `collate`: {_target_: function of a list of
        items, their batch}; `buckets`: lengths, the smallest first, to one of which the samples of
        a step are cut (docs/how_to/data.md).
    eval: the held-out samples.
    optim: the update of the weights.
    updates: several updates in a step, one after the other: a list of {name, loss, parameters,
        optim, every}, each of other parameters; keys of its optim replace those of `optim`
        (docs/how_to/loops.md).
    placement: the ranks.
    sbp: pattern over parameter or module names -> axis -> SBP, or -> in, out -> axis -> SBP;
        from_model -> axis: of the tensor-parallel plan that a model of transformers carries.
    signatures: op of your own, "my::op" -> {_target_: function of its rows, local: function of what
        a rank runs, flops or seconds: function of its cost} (docs/how_to/signatures.md).
    view: consistent (one logical batch, the numbers of one device) or mirrored (each rank has its
        own batch and its own batch norm statistics; gradients are averaged; results are lists with
        an entry for each rank).
    zero: sharding of states, gradients and weights.
    recompute: activation checkpointing.
    auto: searches.
    precision: dtypes.
    train: length, batch, checkpoints.
    launch: processes and hosts.
    callbacks: objects that are called while the run goes on and may end it, such as {_target_:
        flowrun.launcher.listeners.early_stopping.EarlyStopping, patience: 3}
        (docs/how_to/follow.md).
    log: loggers, by name (tensorboard, wandb, mlflow, trackio), with options ({name: wandb,
        project: mine}), or of your own ({_target_: my_module.MyLogger}) (docs/how_to/follow.md).
    engine: plan and execution.
    sweep: what an optimising sweep (`flowrun -m hydra/sweeper=optuna`) looks at.
    hardware: the profile that plans are costed by; hardware=NAME takes a shipped one.
    """

    name: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    adapters: Adapters = field(default_factory=Adapters)
    task: TaskKeys = field(default_factory=TaskKeys)
    data: dict[str, Any] = field(default_factory=dict)
    eval: Eval = field(default_factory=Eval)
    optim: Optim = field(default_factory=Optim)
    updates: list[Any] = field(default_factory=list)
    placement: PlacementSchema = field(default_factory=PlacementSchema)
    sbp: dict[str, Any] = field(default_factory=dict)
    signatures: dict[str, Any] = field(default_factory=dict)
    view: str = "consistent"
    zero: Zero = field(default_factory=Zero)
    recompute: Recompute = field(default_factory=Recompute)
    auto: Auto = field(default_factory=Auto)
    precision: Precision = field(default_factory=Precision)
    train: Train = field(default_factory=Train)
    launch: Launch = field(default_factory=Launch)
    callbacks: list[Any] = field(default_factory=list)
    log: list[Any] = field(default_factory=lambda: ["tensorboard"])
    engine: Engine = field(default_factory=Engine)
    sweep: SweepKeys = field(default_factory=SweepKeys)
    hardware: Hardware = field(default_factory=Hardware)
