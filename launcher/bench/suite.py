"""The keys of a suite -> Suite: what is compared, how often, and what is to come out; its runs, in
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from flowrun.launcher.recipe.recipe_errors import did_you_mean, require

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)

MODES = ("eager", "compiled")
_LOOP = ("recompute", "workers", "whole")
KINDS = {  # to the keys that each reads
    "single": (*_LOOP, "sparse"),
    "ddp": (*_LOOP, "sparse"),
    "zero1": _LOOP,
    "fsdp2": (*_LOOP, "units"),
    "tensor": ("columns", "rows", "classes", "data", "units", "workers"),
    "context": ("units", "workers"),
    "pipeline": ("units", "schedule", "cut", "workers"),
}


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer: the way in which torch alone trains the recipe.

    kind: one of KINDS.  units: patterns of modules in order, which fsdp2 wraps and pipeline cuts
    between, and to which context gives the places of its tokens.  columns, rows: patterns of linear
    layers that tensor splits so; classes: the layer whose outputs stay split through the loss.
    schedule: class of torch.distributed.pipelining without "Schedule".  cut: first unit of each
    later stage; empty: balanced by products.  recompute: patterns of modules that are checkpointed.
    workers: processes a rank that read ahead.  sparse: tables of look-ups have sparse gradients.
    data: with tensor, ranks that divide the batch; fsdp2 shards over these.
    whole: the loss is compiled with the model, where compiled; else the model alone is.
    """

    kind: str
    units: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    classes: str = ""
    schedule: str = ""
    cut: tuple[int, ...] = ()
    recompute: tuple[str, ...] = ()
    workers: int = 0
    sparse: bool = False
    data: int = 1
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment: one layout of flowrun, compared with what torch has for it.

    recipe: empty: the suite's.  overrides: of both sides.  flowrun: of flowrun alone, its layout.
    others: more layouts of flowrun, overrides by the name that the table shows.
    ranks: of a peer.  copies: trainings of flowrun at once that know nothing of each other.
    steps: 0: the suite's.  peers: by the name that the table shows.  at_most: setting, or one of
    `others` -> largest share of a peer's time.  efficiency: least share of a perfect speed-up, 0:
    to be shown.  modes: empty: the suite's.  loss_tolerance: None: the suite's.
    """

    name: str
    title: str = ""
    recipe: str = ""
    overrides: tuple[str, ...] = ()
    flowrun: tuple[str, ...] = ()
    others: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ranks: int = 2
    copies: int = 1
    steps: int = 0
    peers: Mapping[str, Peer] = field(default_factory=dict)
    at_most: Mapping[str, float] = field(default_factory=dict)
    efficiency: float | None = None
    modes: tuple[str, ...] = ()
    loss_tolerance: float | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """Layouts that are measured with the one that auto.placement picks (sweep.py): all grids of
    these numbers of ranks, with these numbers of micro-batches and stages of ZeRO.
    """

    ranks: tuple[int, ...] = (2, 4)
    micro_batches: tuple[int, ...] = (1, 4)
    zero: tuple[int, ...] = (0, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The keys of conf/suite/base.yaml.  rows: the experiments that are run.  sweep: None:
    experiments say their layouts.
    """

    name: str
    note: str = ""
    recipe: str = ""
    overrides: tuple[str, ...] = ()
    rows: tuple[str, ...]
    modes: tuple[str, ...]
    rounds: int
    steps: int
    warmup: int
    loss_tolerance: float
    timeout_s: float
    efficiency_of: str = ""
    settings: Mapping[str, Mapping[str, str]]
    mode_overrides: Mapping[str, tuple[str, ...]]
    experiments: Mapping[str, Experiment]
    sweep: Sweep | None = None

    def recipe_of(self, experiment: Experiment) -> list[str]:
        """Return the overrides of what both sides train."""
        steps = experiment.steps or self.steps
        always = [f"train.steps={steps}", "train.save=false", "eval.batches=0"]
        name = experiment.recipe or self.recipe
        return [f"recipe={name}", *always, *experiment.overrides, *self.overrides]


def parse(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Suite:
    """The suite's keys, checked.  overrides: more, of every experiment.  Raises RecipeError."""
    experiments = {
        str(name): {**(node or {}), "name": name}
        for name, node in (tree.get("experiments") or {}).items()
    }
    given = {
        **tree,
        "experiments": experiments,
        "overrides": [*(tree.get("overrides") or []), *overrides],
        "rows": tree.get("rows") or list(experiments),
    }
    suite = make(Suite, given, "suite")
    _check(suite)
    return suite


def make(kind: type[T], given: Mapping[str, object], where: str) -> T:
    """Make a dataclass of keys, with those that it holds: null is the default of a key, and is left
    out of a mapping.

    where: the dotted key of them.  Raises RecipeError for a key that is not one, or is missing.
    """
    known, hints = {f.name: f for f in fields(kind)}, get_type_hints(kind)
    for key in given:
        problem = f"{where!r} has no key {key!r}."
        require(key in known, f"{where}.{key}", problem, did_you_mean(key, known))
    for key, f in known.items():
        optional = f.default is not MISSING or f.default_factory is not MISSING
        has = optional or given.get(key) is not None
        require(has, f"{where}.{key}", "this key is missing.", "Give it a value.")
    values = {
        key: _convert(hints[key], value, f"{where}.{key}")
        for key, value in given.items()
        if value is not None
    }
    return kind(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    """The value as a field with this type has it."""
    if type(None) in get_args(hint):
        hint = get_args(hint)[0]
    if isinstance(hint, type) and is_dataclass(hint):
        return make(hint, value, where)
    if get_origin(hint) is Mapping:
        kind = get_args(hint)[1]
        pairs = ((str(key), each) for key, each in value.items() if each is not None)
        return {key: _convert(kind, each, f"{where}.{key}") for key, each in pairs}
    if get_origin(hint) is tuple:
        return tuple(value)
    return str(value) if hint is str else value


def _check(suite: Suite) -> None:
    for key, what, words, known in (
        ("rows", "experiment", suite.rows, suite.experiments),
        ("efficiency_of", "experiment", (suite.efficiency_of,), ("", *suite.experiments)),
        ("modes", "mode", suite.modes, MODES),
    ):
        for word in words:
            problem = f"there is no {what} {word!r}."
            require(word in known, f"suite.{key}", problem, did_you_mean(word, known))
    require(
        suite.rounds >= 1 and 0 <= suite.warmup < suite.steps,
        "suite.steps",
        f"{suite.rounds} rounds of {suite.steps} steps, {suite.warmup} of them not counted, "
        "leave nothing to measure.",
        "Write rounds >= 1 and steps > warmup.",
    )
    for name, experiment in suite.experiments.items():
        where, steps = f"suite.experiments.{name}", experiment.steps or suite.steps
        none = f"{experiment.copies} trainings at once measure nothing."
        require(experiment.copies >= 1, f"{where}.copies", none, "Write copies >= 1.")
        none = f"of {steps} steps, {suite.warmup} not counted, nothing is left."
        require(steps > suite.warmup, f"{where}.steps", none, "Write more than suite.warmup.")
        for title, peer in experiment.peers.items():
            _check_peer(peer, f"{where}.peers.{title}")


def _check_peer(peer: Peer, where: str) -> None:
    problem = f"torch has no kind {peer.kind!r} here."
    require(peer.kind in KINDS, f"{where}.kind", problem, did_you_mean(peer.kind, KINDS))
    read = KINDS[peer.kind]
    for key in (f.name for f in fields(Peer)[1:] if f.name not in read):
        require(
            getattr(peer, key) == getattr(Peer(peer.kind), key),
            f"{where}.{key}",
            f"a peer of kind {peer.kind} does not read {key!r}.",
            f"Write some of {', '.join(read)}.",
        )


FLOWRUN = "flowrun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run: one training in processes of its own.

    side: flowrun, or the name of another layout of it, or the peer's.  setting: of the allocator,
    by its name in the suite; empty: flowrun, which has its own.  overrides: of the recipe.
    peer: None: flowrun.  copies: of it that train at once and know nothing of each other.
    """

    experiment: str
    side: str = FLOWRUN
    mode: str = MODES[0]
    setting: str = ""
    overrides: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: int
    peer: Peer | None = None
    copies: int = 1

    def __str__(self) -> str:
        mode = "" if self.mode == MODES[0] else self.mode
        words = (f"{self.experiment}: {self.side}", self.setting, mode)
        return ", ".join(word for word in words if word)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The key that the same runs of other rounds have."""
        return self.experiment, self.side, self.mode, self.setting


def round_of(suite: Suite) -> Iterator[Run]:
    """All runs of one round: flowrun, other layouts of it and its peers in turn, experiment by
    experiment.

    What efficiency is counted from runs too, without peers, if it was not asked for.
    """
    chosen = [suite.experiments[name] for name in suite.rows]
    reference = suite.experiments.get(suite.efficiency_of)
    needed = reference not in chosen and any(each.efficiency is not None for each in chosen)
    for mode in suite.modes:
        if reference and needed:
            yield next(_runs_of(suite, reference, mode))
        for experiment in chosen:
            if mode in (experiment.modes or suite.modes):
                yield from _runs_of(suite, experiment, mode)


def _runs_of(suite: Suite, experiment: Experiment, mode: str) -> Iterator[Run]:
    both = Run(
        experiment=experiment.name,
        mode=mode,
        overrides=tuple(suite.recipe_of(experiment)),
        ranks=experiment.ranks,
    )
    of_mode = suite.mode_overrides.get(mode, ())
    for side, layout in {FLOWRUN: experiment.flowrun, **experiment.others}.items():
        overrides = (*both.overrides, *layout, *of_mode)
        yield replace(both, side=side, overrides=overrides, copies=experiment.copies)
    for side, peer in experiment.peers.items():
        for setting, environment in suite.settings.items():
            yield replace(both, side=side, setting=setting, environment=environment, peer=peer)
