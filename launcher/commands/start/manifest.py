"""The file that starts a recipe on the hosts of a platform: a JobSet, a TrainJob with its runtime,
a task of SkyPilot, a script of sbatch.

Status 75 says that a run was asked to end and has saved: the platform starts the same command
again, which continues (train.resume=auto).  Any other status but 0 is a failure.  Before a platform
kills what it has asked to end, it waits longer than launch.grace_s, after which a run ends itself.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import yaml  # type: ignore[import-untyped]

from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.recipe_errors import CommandLineError, one_of
from flowrun.launcher.recipe.schema import Slurm
from flowrun.launcher.supervise.hosts.meeting import ranks_of_a_host

_AGAIN = 75
_MARGIN_S = 10
Tree = dict[str, object]


@dataclass(frozen=True)
class Wanted:
    """A file asks for this.

    name: of the recipe, as DNS allows it.  command: of each host.  gpu, gpus, cpus: of a host.
    volume, path: a disk that all hosts see, and where.  grace_s: before a kill.
    """

    name: str
    command: tuple[str, ...]
    hosts: int
    gpu: str
    gpus: int
    cpus: int
    image: str
    volume: str
    path: str
    grace_s: int
    slurm: Slurm


def write_manifest(
    platform: str, words: Sequence[str], hosts: int, image: str, volume: str, gpu: str
) -> str:
    """Return the file.  words: of the recipe.  volume: NAME:/PATH.  gpu: SkyPilot's name of it.
    Raises RecipeError.
    """
    if platform not in MANIFESTS:
        known = one_of(MANIFESTS)
        raise CommandLineError(platform, "no file is known for this platform.", f"Write {known}.")
    disk, _, path = volume.partition(":")
    if platform != "slurm" and not path.startswith("/"):
        raise CommandLineError(
            f"--volume {volume}",
            "hosts save on a disk that all of them see, and that outlives them.",
            "Write --volume NAME:/PATH, a volume and where it is mounted.",
        )
    recipe = load([*words])
    launch = replace(recipe.launch, nnodes=hosts)
    ranks = ranks_of_a_host(recipe.num_ranks, launch)
    name = re.sub(r"[^a-z0-9]+", "-", recipe.name.lower()).strip("-")[:40]
    chosen = platform == "slurm" or any(text.startswith("hydra.run.dir=") for text in words)
    folder = () if chosen else (f"hydra.run.dir={path}/{name}",)
    wanted = Wanted(
        name=name,
        command=("flowrun", *words, "train.resume=auto", *folder),
        hosts=hosts,
        gpu=gpu,
        gpus=ranks if launch.device == "cuda" else 0,
        cpus=ranks * (launch.threads + launch.data_workers),
        image=image,
        volume=disk,
        path=path,
        grace_s=math.ceil(launch.grace_s) + _MARGIN_S,
        slurm=launch.slurm,
    )
    return MANIFESTS[platform](wanted)


def _jobset(wanted: Wanted) -> str:
    address = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/coordinator']"}}
    hosts = {"name": "NNODES", "value": str(wanted.hosts)}
    variables = [hosts, {"name": "MASTER_ADDR", "valueFrom": address}]
    spec = {"coordinator": {"replicatedJob": "node"}, **_set_of(wanted, {"env": variables}, {})}
    return _yaml(_object("jobset.x-k8s.io/v1alpha2", "JobSet", wanted.name, spec))


def _trainjob(wanted: Wanted) -> str:
    """Return a runtime of its own, as a TrainJob has no rules for statuses, and the job."""
    labels: Tree = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    runtime = {
        "mlPolicy": {"numNodes": wanted.hosts, "torch": {}},
        "template": {"spec": _set_of(wanted, {}, {"metadata": labels})},
    }
    job: Tree = {"runtimeRef": {"kind": "TrainingRuntime", "name": wanted.name}}
    api = "trainer.kubeflow.org/v1alpha1"
    own = _object(api, "TrainingRuntime", wanted.name, runtime)
    return _yaml(own, _object(api, "TrainJob", wanted.name, job))


def _set_of(wanted: Wanted, variables: Tree, metadata: Tree) -> Tree:
    """A pod that ends with anything but 75 fails the job, and so the set; else all begin again."""
    limits: Tree = {"nvidia.com/gpu": wanted.gpus} if wanted.gpus else {"cpu": wanted.cpus}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": wanted.grace_s,
        "containers": [
            {
                "name": "node",
                "image": wanted.image,
                "command": [*wanted.command],
                **variables,
                "resources": {"limits": limits},
                "volumeMounts": [{"name": "runs", "mountPath": wanted.path}],
            }
        ],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": wanted.volume}}],
    }
    lost = {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    failed = {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [_AGAIN]}}
    job = {
        "parallelism": wanted.hosts,
        "completions": wanted.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [lost, failed]},
        "template": {"spec": pod},
    }
    again = {
        "name": "again",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["BackoffLimitExceeded"],
    }
    return {
        "failurePolicy": {"maxRestarts": 0, "rules": [again]},
        "replicatedJobs": [{"name": "node", "template": {**metadata, "spec": job}}],
    }


def _task(wanted: Wanted) -> str:
    cores: Tree = {"cpus": f"{wanted.cpus}+"}
    task = {
        "name": wanted.name,
        "num_nodes": wanted.hosts,
        "resources": {
            "image_id": f"docker:{wanted.image}",
            **({"accelerators": f"{wanted.gpu}:{wanted.gpus}"} if wanted.gpus else cores),
            "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [_AGAIN]},
        },
        "volumes": {wanted.path: wanted.volume},
        "run": shlex.join(wanted.command),
    }
    return _yaml(task)


def _script(wanted: Wanted) -> str:
    """A job that is put back into the queue keeps its number, and with it the folder."""
    flags = {
        "job-name": wanted.name,
        "nodes": wanted.hosts,
        "ntasks-per-node": 1,
        "cpus-per-task": wanted.cpus,
        "gpus-per-node": wanted.gpus,
        "partition": wanted.slurm.partition,
        "account": wanted.slurm.account,
        "qos": wanted.slurm.qos,
        "time": wanted.slurm.minutes,
        "signal": f"TERM@{wanted.grace_s}",
        "open-mode": "append",
    }
    command = shlex.join(wanted.command)
    if "hydra.run.dir=" not in command:
        command += f' "hydra.run.dir=outputs/slurm/${{SLURM_JOB_ID}}_{wanted.name}"'
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{key}={value}" for key, value in flags.items() if value),
        "#SBATCH --requeue",
        f"srun {command}",
        "status=$?",
        f"[ $status -ne {_AGAIN} ] || scontrol requeue $SLURM_JOB_ID",
        "exit $status",
    ]
    return "\n".join((*lines, ""))


MANIFESTS: Mapping[str, Callable[[Wanted], str]] = {
    "kubernetes": _jobset,
    "kubeflow": _trainjob,
    "skypilot": _task,
    "slurm": _script,
}


def _object(api: str, kind: str, name: str, spec: Tree) -> Tree:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _yaml(*documents: Tree) -> str:
    return str(yaml.safe_dump_all(documents, sort_keys=False, width=1000))
