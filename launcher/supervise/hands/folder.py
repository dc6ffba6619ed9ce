"""The run's folder, as rounds of ranks begin, begin again and end."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import yaml

from flowrun.engine.runtime.process.cpu_share import share_of_others
from flowrun.engine.trace.trace import TraceEvent
from flowrun.launcher.job.compiling import Compiled
from flowrun.launcher.job.job import Start
from flowrun.launcher.ranks.rank_events import RankEnded, Reason, WeightsWritten
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.recipe.key_schema import flatten_keys
from flowrun.launcher.recipe.schema import nodes_of
from flowrun.launcher.report.record import Record
from flowrun.launcher.report.report import Log
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import Checkpoint, find_step, remove_partial
from flowrun.launcher.supervise.hands.lease import Lease, Owner
from flowrun.launcher.supervise.hosts.token import name_folder
from flowrun.launcher.supervise.hosts.words import Host
from flowrun.launcher.supervise.life.events import ROLLED_BACK, Company, FromHost, StartPoint
from flowrun.launcher.supervise.life.instructions import Restart
from flowrun.launcher.supervise.life.run_state import RunState


@dataclass
class Ledger:
    """What the ranks of a round have measured, and where their weights lie.  By rank."""

    ends: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    weights: set[int] = field(default_factory=set)

    def take(self, event: Notice) -> None:
        """Keep what is for the report."""
        event = event.event if isinstance(event, FromHost) else event
        if isinstance(event, RankEnded):
            self.ends[event.rank] = event.measured
        elif isinstance(event, WeightsWritten):
            self.weights.add(event.rank)

    def log(self, record: Record) -> Log:
        """Return everything measured on all ranks."""

        def by_rank(key: str) -> dict[int, Any]:
            return {rank: m[key] for rank, m in sorted(self.ends.items()) if key in m}

        notes = {rank: [TraceEvent(*n) for n in all_] for rank, all_ in by_rank("notes").items()}
        return Log(
            record.steps,
            record.validation,
            peak_bytes=by_rank("peak"),
            sent_bytes=by_rank("sent"),
            process_bytes=by_rank("process_peak"),
            waited_s=by_rank("waited_s"),
            read_s=by_rank("read_s"),
            notes={rank: found for rank, found in notes.items() if found},
            restarts=record.restarts,
            others=share_of_others(record.since),
            measured_steps=record.reached - record.first,
        )

    def join_weights(self, record: Record, state: RunState) -> None:
        """Several hosts: the first makes one file of all shards, which are here by now."""
        if not self.weights:
            return
        company = state.company
        if company.number == 0:
            weights.join_shards(record.run_folder, state.terms.num_ranks)
        elif not company.shared:
            weights.drop_shards(record.run_folder)
            record.note(f"the weights are in the folder of {company.name(0)}")


def describe_host(record: Record, compiled: Compiled, lease: Lease) -> Host:
    """Describe this host to the others, before its first round.  lease: of its folder."""
    job, asked = compiled.job, record.asked
    start, there = job.start, lease.read()
    known = [record.kept.before[0]] if record.kept else []
    keys = {key: str(value) for key, value in flatten_keys(yaml.safe_load(asked.to_yaml()))}
    found = {"launch.device": job.device_type, "launch.nnodes": str(nodes_of(asked.launch))}
    return Host(
        name=platform.node(),
        node_rank=asked.launch.node_rank,
        recipe=keys | found,
        plan=hashlib.sha256(str(compiled.training.plan).encode()).hexdigest(),
        planned=job.recipe.launch.num_hosts if record.agreed else 0,
        start=(start.step, start.checksum) if isinstance(start, Checkpoint) else (0, ""),
        quorum=0,
        epoch=max(0, there.epoch if there else 0, *known),
        versions={package: version(package) for package in ("torch", "flowrun")},
        folder=name_folder(record.run_folder),
    )


def prepare(record: Record, company: Company, may_change: bool, lease: Lease) -> None:
    """Make the folder ready for the ranks of a round: each host writes to one of its own, and the
    first in a folder removes what ranks that have ended left half written.  may_change: hosts may
    join and leave.  Raises RecipeError, RunError, OSError.
    """
    names, door = company.names, company.doors[0] if company.doors else ""
    follows = record.begun and bool(names)  # a run of one host has begun before
    if company.number == 0:
        lease.take(Owner.of_this(company.epoch, door), follows)
        if record.kept:
            record.kept.claim(company.epoch, door, follows)
        record.fence = lease.check
    if company.shared or may_change:
        record.share(company.number if company.shared else 0)
    if may_change:
        count = f"{len(names)} hosts" if len(names) > 1 else "1 host"
        record.say(f"{count} from step {record.first}: {', '.join(names or ('this host',))}")
    if not record.begun:
        record.begin()
    if not company.shared:
        remove_partial(record.run_folder)


def begin_again(record: Record, start: Start | None, again: Restart, state: RunState) -> None:
    """Put the folder where the ranks begin again, and say so.

    start: that this host would begin at; hosts may have agreed on another.
    """
    fault, place, reached = again.fault, again.place, record.reached
    if place.source == ROLLED_BACK:
        _roll_back(record, start, fault, place)
        return
    if start is None or start.step != place.step:
        start = find_step(record.run_folder, place.step)
    record.go_back(start, _line(record, fault, place.step, place.source))
    in_row, terms = state.attempts.in_row, state.terms
    count = f"Restart {in_row} of {terms.restarts}" if in_row else "Goes on"
    why = "" if terms.may_change else f"{fault.where}: {fault.problem.splitlines()[0]} "
    back = reached - place.step
    record.note(f"{why}{count} from step {place.step} ({place.source}), {back} back.")


def _roll_back(record: Record, start: Start | None, fault: Reason, place: StartPoint) -> None:
    """Put the folder after a bad step, with older weights, and say so."""
    first, last = place.weights, place.step - 1
    line = _line(record, fault, place.step, "checkpoint" if first else "beginning")
    record.go_back(start, {**line, "left_out": [first, last]})
    record.leave_out(range(first, place.step))
    of = f"the checkpoint of step {first}" if first else "the beginning"
    record.note(
        f"{fault.where}: {fault.problem.splitlines()[0]} The run goes on at step {place.step} with"
        f" the weights of {of}; the updates of steps {first} to {last} are left out."
    )


def _line(record: Record, fault: Reason, first: int, source: str) -> dict[str, object]:
    return {
        "restart": record.restarts + 1,
        "time": time.time(),
        "where": fault.where,
        "problem": fault.problem,
        "reached": record.reached,
        "first": first,
        "source": source,
    }
