"""Network: the links between ranks as a hierarchy of levels, and the link that a group of ranks
has.

Ranks are numbered consecutively: the ranks of a device follow one another, as do those of a node
and of a pod.  A collective costs as much as on a ring, which is true of NCCL and gloo where the
time matters: a ring crosses each unit's boundary once, so only one flow per unit uses that level.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import lru_cache

from flowrun.engine.ir.placement import Placement


@dataclass(frozen=True, slots=True)
class Level:
    """A level of the network: it joins units of the level below into larger units.

    The innermost level joins single ranks.

    ranks: consecutive ranks of one unit; 0: all.
    latency_s: time before the first byte of one collective or message.
    busy_s: part of latency_s in which the core that computes is busy with the message.
    crowded_latency_s: latency_s where a host has more ranks than cores, so that the awaited rank
        may itself wait for a core; 0: longer by the same factor as everything else.
    hop_s: time that each further unit on the way adds.
    bytes_per_s: speed of one rank, each direction, while all ranks of a unit below send.
    alone_bytes_per_s: the same while the other ranks are silent; 0: as bytes_per_s.
    crowding_s: part of latency_s that passes only while other ranks have the cores; `slow_down`
        sets it.
    taken: share of simultaneous compute that stands still while bytes flow; 1: all of it, as on a
        core that copies them itself.
    mesh: innermost level without a switch: a row of digits for each rank of a unit, the number of
        links to each other rank: "0112": one to the second and third, two to the fourth.
        `bytes_per_s` is what all links of a rank carry together.
    unlinked_bytes_per_s: in a mesh, speed of one rank to all ranks that it has no link to, while
        all ranks send (across the sockets of the host); 0: by way of a neighbour, without loss.
    peer_s: time that each further rank adds to the start of an all-to-all, where every piece is a
        copy of its own.
    shared_memory: the level is the memory of one host.  `launch.transport=gloo` skips it; `ranks`
        are those of a host.
    exchange_bytes: members of a group -> largest message of an all-reduce that runs as an exchange:
        each member sends all of it to each other member, and reduces what it receives.  A group of
        a size that is not listed does as the next larger one; beyond the largest: never.
    """

    ranks: int = 0
    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    hop_s: float = 0.0
    _: KW_ONLY
    alone_bytes_per_s: float = 0.0
    taken: float = 0.0
    mesh: tuple[str, ...] = ()
    unlinked_bytes_per_s: float = 0.0
    peer_s: float = 0.0
    shared_memory: bool = False
    crowded_latency_s: float = 0.0
    busy_s: float = 0.0
    exchange_bytes: dict[int, int] = field(default_factory=dict, hash=False)
    crowding_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", tuple(self.mesh))  # a list, after Hydra

    def max_exchange_bytes(self, members: int) -> int:
        """Return the largest all-reduce, in bytes, that such a group runs as an exchange."""
        larger = (size for size in self.exchange_bytes if size >= members)
        return self.exchange_bytes.get(min(larger, default=0), 0)

    def slow_down(self, share: float) -> Level:
        """Return the level between ranks that have only a `share` of their cores."""
        latency_s, crowding_s = self.latency_s, 0.0
        if self.shared_memory:
            latency_s /= share
        if share < 1 and self.crowded_latency_s:
            latency_s = self.crowded_latency_s
            crowding_s = max(0.0, latency_s - self.latency_s)
        speed = self.bytes_per_s * share if self.shared_memory else self.bytes_per_s
        busy_s = min(latency_s, self.busy_s / share)
        return replace(
            self, latency_s=latency_s, busy_s=busy_s, bytes_per_s=speed, crowding_s=crowding_s
        )


@dataclass(frozen=True, slots=True)
class Link:
    """The part of a network that one group of ranks can use.

    latency_s: time before the first byte.
    bytes_per_s: speed of each rank to the next one in a ring, or in a message.
    ring_s, tree_s: time of all hops of a ring; of those from the leaves of a tree to its root.
    spread_bytes_per_s: speed of each rank to all others equally, as in an all-to-all.
    level: the outermost level that the group crosses; -1 for a single rank.
    peers_s: time that the pieces of an all-to-all add to its start.
    exchange_bytes: the largest all-reduce that runs as an exchange (Level.exchange_bytes).
    busy_s: part of latency_s in which the core that computes is busy with the message.
    crowding_s: part of latency_s that does not pass while each member has a core of its own.
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    ring_s: float = 0.0
    tree_s: float = 0.0
    _: KW_ONLY
    spread_bytes_per_s: float = math.inf
    level: int = -1
    peers_s: float = 0.0
    exchange_bytes: int = 0
    busy_s: float = 0.0
    crowding_s: float = 0.0

    def message_seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


def group_link(levels: Sequence[Level], group: Sequence[int], busy: Sequence[int]) -> Link:
    """Return the link of the ranks of a `group`, while all ranks `busy` communicate in the same
    way.

    levels: of the network, innermost first.  At a level that joins units of u ranks, a unit sends
    at most u times the level's bytes_per_s, in equal shares for its busy ranks; those of the group
    pool theirs into one ring.  So a group with one rank in each node of 8 has an eighth of the
    node's bandwidth, and a group that fills nodes has all of it.  In a mesh a rank uses only its
    links to others of the group.  The slowest level on the way, and the slowest unit in it, decide.
    """
    link = Link()
    for at, (level, below, size) in enumerate(_units(levels)):
        members = Counter(rank // below for rank in group)
        joined = Counter(int(unit * below // size) for unit in members)
        crossed = [unit for unit in members if joined[int(unit * below // size)] > 1]
        if crossed:
            senders = _by_unit(tuple(busy), below)
            ring = spread = math.inf
            for unit in crossed:
                share = _share(level, below, senders[unit]) * _linked_share(level, unit, group)
                ring = min(ring, share * members[unit])
                spread = min(spread, share * (len(group) - 1) / (len(group) - members[unit]))
                spread = min(spread, _unlinked_bytes_per_s(level, unit, group))
            link = Link(
                level.latency_s,
                min(link.bytes_per_s, ring),
                link.ring_s + level.hop_s * sum(units - 1 for units in joined.values()),
                link.tree_s + level.hop_s * math.ceil(math.log2(max(joined.values()))),
                spread_bytes_per_s=min(link.spread_bytes_per_s, spread),
                level=at,
                peers_s=link.peers_s + level.peer_s * _peers(members, below, size),
                exchange_bytes=level.max_exchange_bytes(len(group)),
                busy_s=level.busy_s,
                crowding_s=level.crowding_s,
            )
    return link


def _units(levels: Sequence[Level]) -> Iterator[tuple[Level, int, float]]:
    """Yield (level, ranks of the units that it joins, ranks of the units that it makes)."""
    below = 1
    for at, level in enumerate(levels):
        last = not level.ranks or at == len(levels) - 1
        yield level, below, math.inf if last else level.ranks
        if last:
            return
        below = level.ranks


@lru_cache(maxsize=256)
def _by_unit(ranks: tuple[int, ...], size: int) -> Counter[int]:
    return Counter(rank // size for rank in ranks)


def _share(level: Level, unit_ranks: int, senders: int) -> float:
    """Return the bytes per second of each of the `senders` in a unit of `unit_ranks` ranks."""
    most = level.alone_bytes_per_s or level.bytes_per_s
    return min(most, level.bytes_per_s * unit_ranks / max(1, senders))


def _linked_share(level: Level, rank: int, group: Sequence[int]) -> float:
    """Return the share of a rank's links in a mesh that lead to others of the group; at least one
    link: ranks without one reach each other by way of a neighbour.
    """
    if not level.mesh:
        return 1.0
    size = len(level.mesh)
    links = tuple(map(int, level.mesh[rank % size]))
    near = (other for other in group if other // size == rank // size)
    return max(1, sum(links[other % size] for other in near)) / sum(links)


def _unlinked_bytes_per_s(level: Level, rank: int, group: Sequence[int]) -> float:
    """Return the speed of an all-to-all in a mesh where a rank has no link to some of the group."""
    if not level.mesh or not level.unlinked_bytes_per_s:
        return math.inf
    size = len(level.mesh)
    near = (other for other in group if other // size == rank // size and other != rank)
    past = sum(level.mesh[rank % size][other % size] == "0" for other in near)
    return level.unlinked_bytes_per_s * (len(group) - 1) / past if past else math.inf


def _peers(members: Mapping[int, int], below: int, size: float) -> int:
    """Return the most ranks in other units that one rank meets, inside the joining unit."""
    joined: Counter[int] = Counter()
    for unit, count in members.items():
        joined[int(unit * below // size)] += count
    return max(joined[int(unit * below // size)] - count for unit, count in members.items())


@lru_cache(maxsize=4096)
def axis_links(levels: tuple[Level, ...], placement: Placement) -> tuple[Link, ...]:
    """Return the link of the groups along each axis, for the slowest group, while all are busy."""
    return tuple(
        worst(group_link(levels, group, placement.ranks) for group in placement.groups(axis))
        for axis in range(len(placement.shape))
    )


@lru_cache(maxsize=4096)
def message_link(levels: tuple[Level, ...], source: Placement, target: Placement) -> Link:
    """Return the link of messages from each rank of a grid to another grid, all at once: rank k of
    the larger one talks to the rank at the same fraction of the smaller one.
    """
    sources, targets = source.ranks, target.ranks
    most = max(len(sources), len(targets))
    pairs = {
        (sources[k * len(sources) // most], targets[k * len(targets) // most]) for k in range(most)
    }
    return worst(group_link(levels, pair, sources) for pair in sorted(pairs) if len({*pair}) > 1)


@lru_cache(maxsize=4096)
def move_home(levels: tuple[Level, ...], *placements: Placement) -> tuple[Placement, ...]:
    """Move placements whole units nearer rank 0: pipelines have many stages with equal links."""
    *_, (_, outermost, _) = _units(levels)
    home = min(placement.ranks[0] for placement in placements) // outermost * outermost
    return tuple(Placement(p.axes, tuple(rank - home for rank in p.ranks)) for p in placements)


_MORE_IS_FAST = {"bytes_per_s", "spread_bytes_per_s", "exchange_bytes", "crowding_s"}


def worst(links: Iterable[Link]) -> Link:
    """Return a link that is as slow as the slowest of `links` in every respect."""
    if not (distinct := list(dict.fromkeys(links))):
        return Link()
    each = {f.name: [getattr(link, f.name) for link in distinct] for f in fields(Link)}
    return Link(**{name: (min if name in _MORE_IS_FAST else max)(x) for name, x in each.items()})
