"""Verdicts: what was seen of a run that was struck -> what is wrong with it."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from signal import Signals

from chaos.blows import INTERRUPTED, LINK, ONE, PREEMPTED, STOP, WORKER, WORKERS, Blow, Strike


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a launcher ended.  status: None: it did not, within the bound; negative: by a signal.

    struck: the blow hit it, or its whole host.  printed: all of its output.
    """

    status: int | None
    printed: str
    struck: bool = False


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What was seen.

    ends: of each host.  seconds: from the blow to the end.  missed: the run had ended before.
    lost: steps that were done and that no checkpoint has.
    left: processes and files that outlived it.
    resumed: what the command that went on said if it failed; empty if it ended well.
    differs: what is unlike an undisturbed run; empty if nothing is.
    """

    strike: Strike
    ends: Sequence[Ended]
    seconds: float
    missed: bool
    lost: int
    left: Sequence[str]
    resumed: str
    differs: str


def faults(seen: Observed) -> list[str]:
    """What is wrong; empty if all is as it should be."""
    return [*_of_ends(seen), *_of_names(seen), *_of_rest(seen)]


def _of_ends(seen: Observed) -> Iterator[str]:
    for host, ended in enumerate(seen.ends):
        if ended.status is None:
            yield f"host {host} did not end"
        elif ended.status > 0 and ended.status not in seen.strike.blow.statuses:
            yield f"host {host} ended with status {ended.status}"
        elif ended.status < 0 and not ended.struck:
            yield f"host {host} ended by signal {-ended.status}"
        if "Traceback (most recent call last)" in ended.printed:
            yield f"host {host} printed a traceback"


def _of_names(seen: Observed) -> Iterator[str]:
    """Each terminal that is left names who was struck, if the run ended by the blow."""
    for host, ended in enumerate(seen.ends):
        expected = guilty(seen.strike, host)
        noticed = ended.status is not None and (ended.status > 0 or seen.strike.blow.goes_on)
        if noticed and not seen.missed and not re.search(expected, ended.printed):
            yield f"host {host} does not name {expected!r}"


def guilty(strike: Strike, host: int) -> str:
    """A regular expression of what the terminal of a host has to say."""
    blow = strike.blow
    if blow.target == LINK and not blow.number:
        return rf"\bhost {1 - host}\b"
    how = "stopped by a signal" if blow.number == STOP else Signals(blow.number).name
    if blow.target == WORKER:
        return rf"\brank {strike.rank}\b[\s\S]*{how}"
    if blow.target == WORKERS:
        return rf"\brank \d[\s\S]*{how}"
    if blow.shape != ONE:
        unmet = "" if blow.comes_late else "|did not come"  # struck before the hosts met
        return rf"\bhost {strike.host}\b|stopped|{how}{unmet}"
    return rf"stopped|{how}"


def _of_rest(seen: Observed) -> Iterator[str]:
    asked = {PREEMPTED, INTERRUPTED} & {ended.status for ended in seen.ends}
    if asked and seen.lost > 1 and seen.strike.blow.target != LINK:  # parted hosts save nothing
        yield f"{seen.lost} steps are lost"
    yield from (f"left over: {each}" for each in seen.left)
    if seen.resumed:
        yield f"it did not go on: {seen.resumed}"
    elif seen.differs:
        yield f"unlike an undisturbed run: {seen.differs}"


def table(observed: Iterable[Observed]) -> str:
    """Count by blow: runs, those without a fault, and how long they took to end."""
    by_blow: dict[Blow, list[Observed]] = defaultdict(list)
    for seen in observed:
        by_blow[seen.strike.blow].append(seen)
    rows = [("blow", "runs", "too late", "well", "ended in s", "at most")]
    for blow, runs in by_blow.items():
        times = [seen.seconds for seen in runs if not seen.missed] or [0.0]
        well = sum(not faults(seen) for seen in runs)
        late = sum(seen.missed for seen in runs)
        mean = sum(times) / len(times)
        rows.append(
            (blow.name, str(len(runs)), str(late), str(well), f"{mean:.1f}", f"{max(times):.1f}")
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
