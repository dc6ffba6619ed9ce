"""Aims: which step the ranks of several hosts copy next, so that all copies are of one step.  Pure.

    host H + 1 to all   copied STEP       it has STEP of every rank of host H in its memory
    any host to all     missed STEP       a rank of its own came to STEP before that was a target
    host 0 to all       aim KEPT TARGET   all copies of KEPT are there; the next are of TARGET

The hosts are a ring.  Each has two buffers for each of its own ranks, and two for each rank of the
host before it.  Host 0 chooses the target; a rank that comes to it writes a buffer, and its
launcher sends the buffer on while the rank trains.  With `copied` of every host the target is what
all keep, and there is another; after a `missed` there is another, and what all keep stays.

**What all keep is never written over**: a host opens a buffer for a target, and the aim that names
the target names what is kept.  A sender names it too, as the neighbour may not know the aim yet.
So while no two neighbours are lost, the hosts that are left hold a whole step: the newest that was
ever kept, or one after it.  A copy that was cut off has no stamp, and counts for nothing.

**It is near.**  A target is the next step that is due, so the step that is kept is one interval
back if copies and messages take less than that.  Else a target is missed, and the next ones are
as much further on as messages took.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class Aims:
    """Host 0 knows which step all keep, and which is next.

    hosts: their number.  every: steps from one snapshot to the next, at least.  kept: the step of
    which all copies are there.  target: the next.  margin: steps that ranks may go on before they
    see a new target.  copied: hosts that have their neighbour's copy of the target.
    """

    hosts: int
    every: int
    kept: int
    target: int
    margin: int = 0
    copied: frozenset[int] = field(default_factory=frozenset)

    @staticmethod
    def begin(hosts: int, every: int, first: int) -> Aims:
        """Return the aims of ranks that begin after `first` steps, which a disk holds.

        hosts, every: as above.
        """
        target = find_due(first, every)
        return Aims(hosts=hosts, every=every, kept=first, target=target)

    def take(self, host: int, word: str, step: int, reached: int) -> Aims:
        """Return the aims after a message of a host.

        word, step: the message.  reached: steps done.
        """
        if step != self.target:
            return self
        if word == "missed":
            margin = max(self.margin, reached - step) + 1
            return self._aim(self.kept, find_due(max(reached, step) + margin, self.every), margin)
        copied = self.copied | {host}
        if len(copied) < self.hosts:
            return replace(self, copied=copied)
        margin = self.margin // 2
        return self._aim(step, find_due(max(reached, step) + margin, self.every), margin)

    def _aim(self, kept: int, target: int, margin: int) -> Aims:
        return replace(self, kept=kept, target=target, margin=margin, copied=frozenset())


def find_due(after: int, every: int) -> int:
    """Return the first step that is due after a step."""
    return (after // every + 1) * every
