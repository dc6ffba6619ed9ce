"""All that a page shows, as one tree: the JSON inside of a page, and of `report --format json`.

page.schema.json says what each field means, with its unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Ints = tuple[int, ...]
Texts = tuple[str, ...]
SweepCell = str | float | None


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that a page shows first, with its unit."""

    name: str
    foreseen: str = ""
    measured: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """A stage, or several alike, and how a rank of it spends the first step."""

    stages: str
    ranks: str
    modules: str
    seconds: Mapping[str, float]
    exposed_s: float
    idle_s: float
    peak_bytes: int
    bound_bytes: int
    memory: Mapping[str, Ints]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleView:
    """A module; of equal blocks, all of that name."""

    path: str
    stages: str
    shape: str
    sbp: str
    parameters: tuple[tuple[str, str, str], ...]
    times: int


@dataclass(frozen=True, slots=True)
class BoxingView:
    """A change of a tensor's layout."""

    what: str
    axis: str
    change: str
    bytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeView:
    """A tensor from one module to another, or within one; of equal blocks, all of them."""

    source: int
    target: int
    phase: str
    shape: str
    boxings: tuple[BoxingView, ...]
    times: int


@dataclass(frozen=True, slots=True)
class ActorView:
    """Who acts on a timeline."""

    name: str
    kind: str
    phase: str
    about: str = ""
    reads: Ints = ()
    fills: Ints = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDrawing:
    """A step act by act: columns, with an entry for each act in the order of their beginnings."""

    about: str
    tick_s: float
    lanes: tuple[tuple[str, bool], ...]
    actors: tuple[ActorView, ...]
    lane: Ints
    actor: Ints
    act: Ints
    start: Ints
    length: Ints
    cause: Ints
    why: Ints
    register: Ints
    reasons: Texts
    slots: Mapping[int, int]
    chain: Ints = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficView:
    """Messages of a step that are alike."""

    axis: str
    phase: str
    what: str
    times: int
    bytes: float
    seconds: float
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan of a recipe."""

    figures: tuple[Figure, ...]
    stages: tuple[StageView, ...]
    modules: tuple[ModuleView, ...]
    edges: tuple[EdgeView, ...]
    drawing: StepDrawing
    traffic: tuple[TrafficView, ...]
    bounds: tuple[tuple[str, float], ...]
    notes: Texts
    recipe: str


@dataclass(frozen=True, slots=True)
class CurveView:
    """A number of a run by steps; of a long run, at some of them."""

    tag: str
    steps: Ints
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run, by its folder."""

    folder: str
    name: str
    status: str
    figures: tuple[Figure, ...]
    curves: tuple[CurveView, ...]
    restarts: tuple[tuple[int, str], ...]
    notes: Texts
    keys: Mapping[str, str]
    drawing: StepDrawing | None
    samples: tuple[tuple[int, str, str], ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepView:
    """The table of a sweep."""

    keys: Texts
    numbers: Texts
    rows: tuple[Mapping[str, SweepCell], ...]
    objective: str
    highest: bool
    best: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of a plan, of runs, or of a sweep and its runs."""

    title: str
    made_by: str
    plan: PlanView | None = None
    runs: tuple[RunView, ...] = ()
    sweep: SweepView | None = None
