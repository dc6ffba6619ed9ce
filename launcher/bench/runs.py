"""Suite -> Runs: what runs, in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from flowrun.launcher.bench.suite import MODES, Experiment, Peer, Suite

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
