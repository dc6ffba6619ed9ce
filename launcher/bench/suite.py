"""conf/suite + command line -> Suite: what is compared, how often, and what is to come out.

Overrides that begin with `suite` or `hydra` are the suite's; all others go to every recipe, of
flowrun and of the peers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from flowrun.engine.errors import RecipeError
from flowrun.launcher.bench.foreseen import published
from flowrun.launcher.bench.foreseen.published import Foreseen
from flowrun.launcher.recipe import hydra_source
from flowrun.launcher.recipe.compose import CONFIG_MODULE
from flowrun.launcher.recipe.recipe_errors import (
    COMPOSING_ERRORS,
    PlacedError,
    did_you_mean,
    from_hydra,
)

CONFIG_NAME = "bench"
MODES = ("eager", "compiled")
_LOOP = ("recompute", "workers", "whole")
KINDS = {  # to the keys that each reads
    "single": (*_LOOP, "sparse"),
    "ddp": (*_LOOP, "sparse"),
    "zero1": _LOOP,
    "fsdp2": (*_LOOP, "units"),
    "tensor": ("columns", "rows", "classes", "data", "units", "workers"),
    "pipeline": ("units", "schedule", "cut", "workers"),
}
_OURS = re.compile(r"[+~]*(suite|hydra)[.=/]")


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer: the way in which torch alone trains the recipe.

    kind: one of KINDS.  units: patterns of modules in order, which fsdp2 wraps and pipeline cuts
    between.  columns, rows: patterns of linear layers that tensor splits so; classes: the layer
    whose outputs stay split through the loss.  schedule: class of torch.distributed.pipelining
    without "Schedule".  cut: first unit of each later stage; empty: balanced by products.
    recompute: patterns of modules that are checkpointed.  workers: processes a rank that read
    ahead.  sparse: tables of look-ups have sparse gradients.  data: with tensor, ranks that
    divide the batch; fsdp2 shards over these.
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


@dataclass(frozen=True, slots=True)
class Suite:
    """The keys of conf/suite/base.yaml.  experiments: by name; rows: those that are run.  sweep:
    None: experiments say their layouts.
    """

    name: str
    note: str
    recipe: str
    overrides: tuple[str, ...]
    rows: tuple[str, ...]
    modes: tuple[str, ...]
    rounds: int
    steps: int
    warmup: int
    loss_tolerance: float
    timeout_s: float
    efficiency_of: str
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


def load_suite(
    arguments: list[str], config_dir: str | None = None
) -> tuple[Suite | Foreseen, Path]:
    """The suite that `suite=NAME suite.key=value key=value …` means, and the folder of its results.

    A suite of `kind: foreseen` runs nothing (foreseen/).  config_dir: a folder of the user's own
    groups (suite/, published/), searched first.  Raises RecipeError.
    """
    ours = [_spell(text) for text in arguments if _OURS.match(text)]
    of_recipes = [text for text in arguments if not _OURS.match(text)]
    if config_dir is not None:
        ours.append(f"hydra.searchpath=['file://{Path(config_dir).absolute()}']")
    hydra_source.register()
    try:
        with hydra.initialize_config_module(
            CONFIG_MODULE, version_base="1.3", job_name=CONFIG_NAME
        ):
            cfg = hydra.compose(CONFIG_NAME, ours, return_hydra_config=True)
            folder = _folder(cfg)
    except COMPOSING_ERRORS as error:
        raise from_hydra(error, OmegaConf.create({"suite": {}})) from error
    tree: Any = OmegaConf.to_container(cfg.suite, resolve=True)
    try:
        made = published.parse if tree.get("kind") == published.KIND else parse
        return made(tree, of_recipes), folder
    except RecipeError as error:
        if any(text.lstrip("+").partition("=")[0] == error.where for text in ours):
            raise
        place = f"suite {tree.get('name')}"  # its files are no part of the recipe
        raise PlacedError(place, error.where, error.problem, error.instead) from error


def list_suites() -> str:
    """Return the suites that come with flowrun, a line each."""
    folder = Path(__file__).resolve().parents[2] / "conf" / "suite"
    found: Any = {file.stem: OmegaConf.load(file) for file in sorted(folder.glob("*.yaml"))}
    notes = {name: suite.get("note") for name, suite in found.items()}
    return "\n".join(f"{name:<15} {note}" for name, note in notes.items() if note)


def parse(tree: dict[str, Any], overrides: list[str] | None = None) -> Suite:
    """The suite's keys, checked.  overrides: more of them, of every experiment."""
    experiments = {
        str(name): _experiment(str(name), node or {})
        for name, node in (tree.get("experiments") or {}).items()
    }
    settings = {
        str(name): {str(key): str(value) for key, value in variables.items()}
        for name, variables in (tree.get("settings") or {}).items()
        if variables is not None
    }
    modes = {name: tuple(given) for name, given in (tree.get("mode_overrides") or {}).items()}
    given = {
        **tree,
        "experiments": experiments,
        "sweep": _make(Sweep, tree["sweep"], "suite.sweep") if tree.get("sweep") else None,
        "settings": settings,
        "mode_overrides": modes,
        "overrides": [*(tree.get("overrides") or []), *(overrides or [])],
        "rows": [*(tree.get("rows") or experiments)],
    }
    suite: Suite = _make(Suite, given, "suite")
    _check(suite)
    return suite


def _spell(text: str) -> str:
    """Add the `+` that Hydra wants for keys that the file leaves open
    (`suite.experiments.mine.ranks`).
    """
    return f"++{text}" if text.startswith("suite.") else text


def _folder(cfg: DictConfig) -> Path:
    """Return the folder where Hydra would run: the pattern of hydra.run.dir, filled in."""
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        return Path(str(cfg.hydra.run.dir))


def _experiment(name: str, node: dict[str, Any]) -> Experiment:
    where = f"suite.experiments.{name}"
    peers = {
        str(title): _make(Peer, given or {}, f"{where}.peers.{title}")
        for title, given in (node.get("peers") or {}).items()
    }
    others = {str(title): tuple(given) for title, given in (node.get("others") or {}).items()}
    given = {**node, "name": name, "peers": peers, "others": others}
    made: Experiment = _make(Experiment, given, where)
    for title, peer in peers.items():
        _check_peer(peer, f"{where}.peers.{title}")
    return made


def _check_peer(peer: Peer, where: str) -> None:
    if peer.kind not in KINDS:
        raise RecipeError(
            f"{where}.kind",
            f"torch has no kind {peer.kind!r} here.",
            did_you_mean(peer.kind, KINDS),
        )
    for key in (f.name for f in fields(Peer) if f.name not in ("kind", *KINDS[peer.kind])):
        if getattr(peer, key) != getattr(Peer(peer.kind), key):
            raise RecipeError(
                f"{where}.{key}",
                f"a peer of kind {peer.kind} does not read {key!r}.",
                f"Write some of {', '.join(KINDS[peer.kind])}.",
            )


def _make(kind: Any, given: Mapping[str, Any], where: str) -> Any:
    """Make the dataclass of these keys; lists become tuples, null its default or nothing."""
    known = {f.name: f for f in fields(kind)}
    values = {}
    for key, value in given.items():
        if key not in known:
            raise RecipeError(
                f"{where}.{key}", f"{where!r} has no key {key!r}.", did_you_mean(key, known)
            )
        if value is None:
            fallback = known[key].default
            value = "" if fallback is MISSING else fallback
        values[key] = tuple(value) if isinstance(value, list) else value
    missing = [
        name
        for name, f in known.items()
        if name not in values and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise RecipeError(f"{where}.{missing[0]}", "this key is missing.", "Give it a value.")
    return kind(**values)


def _check(suite: Suite) -> None:
    names = {*suite.rows, *([suite.efficiency_of] if suite.efficiency_of else [])}
    for name in sorted(names - suite.experiments.keys()):
        key = "rows" if name in suite.rows else "efficiency_of"
        raise RecipeError(
            f"suite.{key}",
            f"there is no experiment {name!r}.",
            did_you_mean(name, suite.experiments),
        )
    for name, experiment in suite.experiments.items():
        if experiment.copies < 1:
            raise RecipeError(
                f"suite.experiments.{name}.copies",
                f"{experiment.copies} trainings at once measure nothing.",
                "Write copies >= 1.",
            )
        if experiment.steps and experiment.steps <= suite.warmup:
            raise RecipeError(
                f"suite.experiments.{name}.steps",
                f"of {experiment.steps} steps, {suite.warmup} not counted, nothing is left.",
                "Write more than suite.warmup.",
            )
    for mode in (m for m in suite.modes if m not in MODES):
        raise RecipeError("suite.modes", f"{mode!r} is not a mode.", did_you_mean(mode, MODES))
    if suite.rounds < 1 or not 0 <= suite.warmup < suite.steps:
        raise RecipeError(
            "suite.steps",
            f"{suite.rounds} rounds of {suite.steps} steps, {suite.warmup} of them not counted, "
            "leave nothing to measure.",
            "Write rounds >= 1 and steps > warmup.",
        )
