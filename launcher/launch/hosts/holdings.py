"""The hub saves what the hosts that are here hold of a run in their memory.  Pure.

Where ranks have died, each host that is left says of which steps it holds which ranks: its own, and
copies of its neighbour's (restart/aims.py).  The hub (hub.py) looks for the newest step of which
all ranks are held by someone and that is newer than every checkpoint, lets each host write what no
other does, and one of them complete the checkpoint.  The hosts go on from it as from any other,
also those that come back empty, and also in another layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Steps = tuple[tuple[int, tuple[int, ...]], ...]
File = tuple[int, int, int]  # rank, bytes, checksum


@dataclass(frozen=True, kw_only=True)
class Holding:
    """A host says what it holds in memory.

    round: in which its ranks trained; what is held of two rounds is never put together.  ranks:
    their number, on all hosts.  steps: steps done, and the ranks that are held as they were then.
    saved: the step of which this host has written files.  files: those.
    """

    round: str = ""
    ranks: int = 0
    steps: Steps = ()
    saved: int = -1
    files: tuple[File, ...] = ()

    @staticmethod
    def read(fields: Mapping[str, object]) -> Holding:
        """Return the holding that a JSON object describes.  Raises TypeError, ValueError."""
        found = Holding(**fields)  # type: ignore[arg-type]
        steps = tuple((int(step), tuple(map(int, ranks))) for step, ranks in found.steps)
        files = tuple((int(rank), int(size), int(crc)) for rank, size, crc in found.files)
        return Holding(
            round=found.round, ranks=found.ranks, steps=steps, saved=found.saved, files=files
        )


@dataclass(frozen=True)
class Rescue:
    """A step that is held and on no disk.

    step: steps done.  writes: for hosts, ranks that they are to write.  files: of all ranks, once
    they are written.  completes: the host that makes them a checkpoint.
    """

    step: int
    writes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    files: tuple[File, ...] = ()
    completes: int = -1


def find_rescue(holdings: Mapping[int, Holding], newest: int) -> Rescue | None:
    """Return what is to be saved; None if nothing is.

    holdings: of the hosts that are here.  newest: step of the newest checkpoint.
    """
    found: dict[tuple[int, str], dict[int, int]] = {}  # a step of a round: rank -> host
    for host, holding in sorted(holdings.items()):
        for step, ranks in holding.steps:
            holders = found.setdefault((step, holding.round), {})
            for rank in ranks:
                holders.setdefault(rank, host)
    sizes = {holding.round: holding.ranks for holding in holdings.values()}
    whole = [(step, name) for (step, name), held in found.items() if len(held) == sizes[name]]
    if not whole or max(whole)[0] <= newest:
        return None
    step, name = max(whole)
    saved = {
        file[0]: (file, host)
        for host, holding in holdings.items()
        if (holding.saved, holding.round) == (step, name)
        for file in holding.files
    }
    left = {rank: host for rank, host in found[step, name].items() if rank not in saved}
    if left:
        hosts = sorted(set(left.values()))
        return Rescue(step, {h: tuple(r for r in sorted(left) if left[r] == h) for h in hosts})
    return Rescue(
        step,
        files=tuple(saved[rank][0] for rank in sorted(saved)),
        completes=min(host for _, host in saved.values()),
    )
