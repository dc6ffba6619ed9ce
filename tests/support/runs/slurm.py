"""A cluster of Slurm on one machine: a controller, and two nodes."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
NodeName=n0 NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs=2
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={second} CPUs=2
PartitionName=all Nodes=n0,n1 Default=YES State=UP
"""
# names of nodes resolve on a cluster; here for the nodes alone
NODES = """\
mount --bind {folder}/hosts /etc/hosts
slurmctld -D -c & for node in n0 n1; do slurmd -D -N $node & done
wait
"""
_START_S = 30


def find_lack() -> str:
    """Say why there can be no cluster here; empty if there can."""
    lacking = [
        name for name in ("slurmctld", "slurmd", "srun", "unshare") if not shutil.which(name)
    ]
    if lacking or sys.platform != "linux" or os.getuid():
        return f"no cluster of Slurm: {', '.join(lacking) or 'it needs root'}"
    return ""


class Slurm:
    """A cluster, from `with` on.  folder: of its state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "slurm.conf"

    def __enter__(self) -> "Slurm":
        from support.runs.command import free_port

        ports = {key: free_port() for key in ("port", "first", "second")}
        self.file.write_text(CONFIGURATION.format(folder=self.folder, **ports))
        hosts = Path("/etc/hosts").read_text()
        (self.folder / "hosts").write_text(f"{hosts}\n127.0.0.1 n0 n1\n")
        for name in ("state", "spool.n0", "spool.n1"):
            (self.folder / name).mkdir()
        command = ["unshare", "--mount", "sh", "-c", NODES.format(folder=self.folder)]
        with (self.folder / "out").open("wb") as out:
            self._daemons = subprocess.Popen(
                command, env=self._variables, stdout=out, stderr=out, start_new_session=True
            )
        until = time.monotonic() + _START_S
        while "idle" not in self.call("sinfo", "-h", "-o", "%T") and time.monotonic() < until:
            assert self._daemons.poll() is None, (self.folder / "out").read_text()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        os.killpg(self._daemons.pid, 15)
        self._daemons.wait()

    @property
    def _variables(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.file)}

    def call(self, *command: str) -> str:
        """Return what a command of Slurm prints."""
        done = subprocess.run(command, env=self._variables, capture_output=True, text=True)
        return done.stdout

    def srun(self, *flags: str) -> tuple[str, ...]:
        """The beginning of a command on this cluster."""
        return ("env", f"SLURM_CONF={self.file}", "srun", *flags)

    def submit(self, folder: Path, script: str) -> int:
        """Submit a script, and return its status at its end."""
        command = ("sbatch", "--wait", f"--chdir={folder}", str(folder / script))
        job = subprocess.Popen(command, env=self._variables, stdout=subprocess.DEVNULL)
        begins = False
        while True:
            try:
                return job.wait(timeout=1)
            except subprocess.TimeoutExpired:  # what is put back into the queue waits for minutes
                number, _, reason = self.call("squeue", "-h", "-o", "%i %r").strip().partition(" ")
                if reason == "BeginTime" and not begins:
                    # in the second of its end a node takes the job for the one that has ended
                    self.call("scontrol", "update", f"JobId={number}", "StartTime=now+3")
                    begins = True
