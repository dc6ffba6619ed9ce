"""Suite -> Runs: what runs, in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

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
    side: str
    mode: str
    setting: str
    overrides: tuple[str, ...]
    environment: Mapping[str, str]
    ranks: int
    peer: Peer | None = None
    copies: int = 1

    def __str__(self) -> str:
        words = [f"{self.experiment}: {self.side}", self.setting]
        return ", ".join(word for word in (*words, *self._unusual) if word)

    @property
    def _unusual(self) -> list[str]:
        return [] if self.mode == MODES[0] else [self.mode]


def round_of(suite: Suite) -> Iterator[Run]:
    """All runs of one round: flowrun, other layouts of it and its peers in turn, experiment by
    experiment.

    What efficiency is counted from runs too, without peers, if it was not asked for.
    """
    chosen = list(suite.rows)
    reference = suite.efficiency_of
    needed = any(suite.experiments[name].efficiency is not None for name in chosen)
    for mode in suite.modes:
        if needed and reference and reference not in chosen:
            yield _of_flowrun(suite, suite.experiments[reference], mode)
        for name in chosen:
            experiment = suite.experiments[name]
            if not experiment.modes or mode in experiment.modes:
                yield _of_flowrun(suite, experiment, mode)
                for title, layout in experiment.others.items():
                    yield _of_flowrun(suite, replace(experiment, flowrun=layout), mode, title)
                yield from _of_peers(suite, experiment, mode)


def _of_flowrun(suite: Suite, experiment: Experiment, mode: str, side: str = FLOWRUN) -> Run:
    overrides = suite.recipe_of(experiment)
    overrides += [*experiment.flowrun, *suite.mode_overrides.get(mode, ())]
    name, ranks, copies = experiment.name, experiment.ranks, experiment.copies
    return Run(
        experiment=name,
        side=side,
        mode=mode,
        setting="",
        overrides=tuple(overrides),
        environment={},
        ranks=ranks,
        copies=copies,
    )


def _of_peers(suite: Suite, experiment: Experiment, mode: str) -> Iterator[Run]:
    overrides = tuple(suite.recipe_of(experiment))
    for title, peer in experiment.peers.items():
        for setting, environment in suite.settings.items():
            yield Run(
                experiment=experiment.name,
                side=title,
                mode=mode,
                setting=setting,
                overrides=overrides,
                environment=environment,
                ranks=experiment.ranks,
                peer=peer,
            )
