"""Decide whether two hosts run the same thing, and which number each host gets.  Pure.

Every launcher describes itself when it comes (Host).  A difference that would make ranks wait for
each other, or train on unlike plans, is an error that names the keys and both values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowrun.engine.errors import RecipeError
from flowrun.launcher.ranks.rank_events import Reason
from flowrun.launcher.recipe.schema import Launch
from flowrun.launcher.supervise.hosts.words import Host

_OF_A_HOST = tuple(f"launch.{key}" for key in ("node_rank", "rdzv_endpoint", "join_s", "threads"))
_OF_THE_PLAN = ("hardware.",)  # keys that matter only if the plans differ
_MOST_KEYS = 3  # that are named, of those that differ
SAME_COMMAND = "Give the same command on each host, with the same versions installed."


def find_mismatch(first: Host, other: Host) -> Reason | None:
    """Find why `other` cannot train with the host that came first; None if it can."""
    differ = [
        key
        for key in dict.fromkeys(("launch.nnodes", *first.recipe, *other.recipe))
        if first.recipe.get(key) != other.recipe.get(key) and key not in _OF_A_HOST
    ]
    wrong = [key for key in differ if not key.startswith(_OF_THE_PLAN)]
    is_other_plan = first.planned == other.planned and first.plan != other.plan
    if wrong or (differ and is_other_plan):
        named = [
            f"{key} " + _both(first, other, first.recipe.get(key), other.recipe.get(key))
            for key in (wrong or differ)[:_MOST_KEYS]
        ]
        return Reason((wrong or differ)[0], "\n".join(named), SAME_COMMAND)
    return _explain_plans(first, other) if is_other_plan else None


def _explain_plans(first: Host, other: Host) -> Reason:
    """Name the package whose versions explain that two hosts made other plans."""
    for package, ours in first.versions.items():
        if ours != (theirs := other.versions.get(package)):
            both = _both(first, other, ours, theirs)
            return Reason(f"the installed {package}", both, SAME_COMMAND)
    differs = f"that of {other.name} differs from that of {first.name}."
    return Reason("the plan", differs, SAME_COMMAND)


def _both(first: Host, other: Host, ours: Any, theirs: Any) -> str:
    return f"is {ours} on {first.name}, and {theirs} on {other.name}."


def number_hosts(hosts: Sequence[Host]) -> list[int] | Reason:
    """Return each host's number: its node_rank, or the first that is free in the order of names.

    hosts: in the order in which they came; the first holds the meeting, and is number 0 unless
    its recipe says otherwise.
    """
    taken = [host.node_rank for host in hosts if host.node_rank is not None]
    for rank in taken:
        if taken.count(rank) > 1:
            names = " and ".join(host.name for host in hosts if host.node_rank == rank)
            return Reason("launch.node_rank", f"is {rank} on {names}.", "Number them 0, 1, …")
    free = iter(sorted(set(range(len(hosts))) - set(taken)))
    order = sorted(range(len(hosts)), key=lambda k: (k > 0, hosts[k].name, k))
    given = {k: next(free) for k in order if hosts[k].node_rank is None}
    return [given.get(k, host.node_rank or 0) for k, host in enumerate(hosts)]


def ranks_of_a_host(num_ranks: int, launch: Launch) -> int:
    """Return how many ranks each host runs.  Raises RecipeError if hosts would have unlike numbers.

    num_ranks: of the whole run.
    """
    if num_ranks % launch.num_hosts:
        raise RecipeError(
            "launch.nnodes",
            f"{num_ranks} ranks cannot be divided over {launch.num_hosts} hosts.",
            f"Place a multiple of {launch.num_hosts} ranks, or write launch.nnodes=1.",
        )
    return num_ranks // launch.num_hosts
