"""The platform that started this process, read from its environment.  Pure.

Invariant: the hosts of a run are one decision, made from the keys given by hand and one row of
ROWS; and N processes of one host never start N runs: one of them launches, the others wait.

Rows stand in the order in which starters contain each other, the innermost first: a torchrun that
srun has started inherits the variables of Slurm.  A row counts where all variables that it names
are there: a shell in a job, and an exported RANK, make none.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

Variables = Mapping[str, str]
Cell = str | Callable[[Variables], object]  # a variable, or what is made of some

_PORTS = range(20_000, 30_000)  # of host 0; the name of the job chooses
_SHELLS = 0xFFFFFFF0  # and above: steps of batch scripts and of salloc's shells (slurm.h)


@dataclass(frozen=True)
class Platform:
    """A platform has started this process as one of several.

    hosts, host: how many, and which is this.  processes, process: of this host.  ranks, rank: of
    all.  address, port: of host 0.  job: of no other at that time.  None, "" and 0: not known.
    """

    name: str
    hosts: int
    host: int | None = None
    processes: int = 1
    process: int = 0
    ranks: int = 1
    rank: int = 0
    address: str = ""
    port: int = 0
    job: str = ""
    secret: str = ""
    fewest: int = 0  # hosts that there may be

    @property
    def nnodes(self) -> int | str:
        """Return how many hosts there are, as launch.nnodes has it."""
        return f"{self.fewest}:{self.hosts}" if self.fewest else self.hosts

    @property
    def endpoint(self) -> str:
        """Where launchers meet; empty if the address of host 0 is not known."""
        port = self.port or _port_of(self.job)
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{port}" if self.address else ""


@dataclass(frozen=True)
class Seat:
    """A process has a seat in a run.

    nnodes, node_rank, endpoint: keys of `launch`.  waits: another process of its host launches.
    others: how many wait for this one.  notes: what was read, and which keys contradict it.
    """

    nnodes: int | str | None = None
    node_rank: int | None = None
    endpoint: str = ""
    waits: bool = False
    others: int = 0
    notes: tuple[str, ...] = ()


def decide(
    platform: Platform | None, nnodes: int | str | None, node_rank: int | None, endpoint: str
) -> Seat:
    """Return the seat of this process.  nnodes, node_rank, endpoint: keys that were given by hand.

    Processes of one host are hosts of their own where launch.nnodes is the number of all processes.
    """
    given = Seat(nnodes, node_rank, endpoint)
    if platform is None:
        return given
    if str(nnodes).rpartition(":")[2] == str(platform.ranks) and platform.ranks > platform.hosts:
        return _seat_of_host(replace(platform, hosts=platform.ranks, host=platform.rank), given)
    found, others = _seat_of_host(platform, given), platform.processes - 1
    if not others:
        return found
    note = (
        f"{platform.name} started {others + 1} processes on this host: one launches the ranks, on"
        " the cores and GPUs that it sees, and the others wait for it"
    )
    waits = platform.process > 0
    return replace(found, waits=waits, others=0 if waits else others, notes=(note, *found.notes))


def _seat_of_host(platform: Platform, given: Seat) -> Seat:
    """Return the keys of one host: those given by hand, and what they leave open."""
    name, hosts, host, rank = platform.name, platform.hosts, platform.host, given.node_rank
    fewest, may_change, most = str(given.nnodes or platform.nnodes).partition(":")
    if (most or fewest) != str(hosts):
        note = f"launch.nnodes={given.nnodes} counts, though {name} started {hosts} hosts"
        return replace(given, notes=(note,))
    if hosts == 1:
        return given
    endpoint, notes = given.endpoint or platform.endpoint, list[str]()
    if rank is None:
        rank = None if may_change else host
    elif host not in (None, rank):
        notes.append(f"launch.node_rank={rank} counts, though {name} numbered it {host}")
    number = "" if rank is None else f"; this is host {rank}"
    notes.append(f"{name} started {hosts} hosts, which meet at {endpoint}{number}")
    return Seat(given.nnodes or platform.nnodes, rank, endpoint, notes=tuple(notes))


def read_platform(variables: Variables) -> Platform | None:
    """Return the platform that started a process with these variables; None: nothing did."""
    for name, cells in ROWS.items():
        # else its row does not count
        with suppress(KeyError, ValueError, IndexError, ZeroDivisionError):
            found = {field: _read(field, cell, variables) for field, cell in cells.items()}
            return Platform(name, **found)  # type: ignore[arg-type]
    return None


def _read(field: str, cell: Cell, variables: Variables) -> object:
    value = variables[cell] if isinstance(cell, str) else cell(variables)
    return value if value is None or field in ("address", "job", "secret") else int(str(value))


def _port_of(job: str) -> int:
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]


def _first_node(variables: Variables) -> str:
    """Return the first name of Slurm's list, such as "n[003-005,7],login"."""
    names = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", names).split(",")[0]


def _tasks_here(variables: Variables) -> int:
    """Return Slurm's number of tasks on this node, out of "2(x3),1".  No shell is read."""
    if int(variables["SLURM_STEP_ID"]) >= _SHELLS or "SLURM_PTY_PORT" in variables:
        raise ValueError
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", variables["SLURM_STEP_TASKS_PER_NODE"])
    tasks = [int(count) for count, times in groups for _ in range(int(times or 1))]
    return tasks[int(variables["SLURM_NODEID"])]


def _host_of_mpirun(variables: Variables) -> str:
    """Return the host of mpirun, unless Slurm says which is the first.

    Open MPI 4 has it in "job;tcp://192.0.2.2,10.0.0.2:59795;tcp6://[fd00::2]:53371".
    """
    uri = variables.get("OMPI_MCA_orte_hnp_uri", "")
    found = re.search(r"tcp6?://\[?([^],]+?)\]?(?:,|:\d+(?:;|$))", uri)
    return _first_node(variables) or (found[1] if found else "")


def _mpi(prefix: str, local: str) -> dict[str, Cell]:
    """Return the cells of an MPI, which numbers processes and no hosts: as many on each host."""
    size = f"{prefix}SIZE"
    return {
        "hosts": lambda v: -(-int(v[size]) // int(v[local])),
        "host": lambda v: None,  # the meeting numbers them: host 0 is that of the endpoint
        "processes": local,
        "ranks": size,
        "rank": f"{prefix}RANK",
    }


_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
ROWS: Mapping[str, Mapping[str, Cell]] = {
    "torchrun": {
        "hosts": "GROUP_WORLD_SIZE",
        "host": "GROUP_RANK",
        "processes": "LOCAL_WORLD_SIZE",
        "process": "LOCAL_RANK",
        "ranks": "WORLD_SIZE",
        "rank": "RANK",
        "address": "MASTER_ADDR",  # torchrun itself listens at MASTER_PORT
        "job": lambda v: " ".join(v[name] for name in _JOB),
    },
    "Open MPI": {
        **_mpi("OMPI_COMM_WORLD_", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        "process": "OMPI_COMM_WORLD_LOCAL_RANK",
        "address": _host_of_mpirun,
        "job": lambda v: v.get("PMIX_NAMESPACE", ""),
        "secret": lambda v: v.get("OMPI_MCA_orte_precondition_transports", ""),  # random, by mpirun
    },
    "MPICH": {  # and Intel's: mpiexec.hydra
        **_mpi("PMI_", "MPI_LOCALNRANKS"),
        "process": "MPI_LOCALRANKID",
        "address": _first_node,
        "port": lambda v: _port_of(v.get("SLURM_JOB_ID", "")),
    },
    "Slurm": {
        "hosts": "SLURM_STEP_NUM_NODES",
        "host": "SLURM_NODEID",
        "processes": _tasks_here,
        "process": "SLURM_LOCALID",
        "ranks": "SLURM_STEP_NUM_TASKS",
        "rank": "SLURM_PROCID",
        "address": _first_node,
        "job": lambda v: f"{v['SLURM_JOB_ID']}.{v['SLURM_STEP_ID']}",
    },
    "Kubeflow": {
        "hosts": "PET_NNODES",
        "host": "PET_NODE_RANK",
        "address": "PET_MASTER_ADDR",
        "port": "PET_MASTER_PORT",
    },
    "elastic PyTorchJob": {  # of Kubeflow: MIN:MAX hosts without numbers
        "fewest": lambda v: v["PET_NNODES"].split(":")[0],
        "hosts": lambda v: v["PET_NNODES"].split(":")[1],
        "address": lambda v: v["PET_RDZV_ENDPOINT"].rpartition(":")[0],
        "port": lambda v: v["PET_RDZV_ENDPOINT"].rpartition(":")[2],
    },
    "JobSet": {  # whose manifest sets NNODES and MASTER_ADDR
        "hosts": "NNODES",
        "host": "JOB_COMPLETION_INDEX",
        "address": "MASTER_ADDR",
        "port": lambda v: v.get("MASTER_PORT", "29500"),
    },
    "SkyPilot": {
        "hosts": lambda v: len(v["SKYPILOT_NODE_IPS"].split()),
        "host": "SKYPILOT_NODE_RANK",
        "address": lambda v: v["SKYPILOT_NODE_IPS"].split()[0],
        "job": lambda v: v.get("SKYPILOT_TASK_ID", ""),
    },
}
