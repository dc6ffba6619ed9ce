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
from dataclasses import dataclass

import yaml  # type: ignore[import-untyped]

from flowrun.engine.errors import RecipeError
from flowrun.launcher.recipe.compose import compose, to_recipe
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import CommandLineError, one_of
from flowrun.launcher.recipe.schema import Slurm
from flowrun.launcher.terminal.exit_status import PREEMPTED

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
    """Return the file.  volume: NAME:/PATH.  gpu: SkyPilot's name of it.  Raises RecipeError."""
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
    if platform == "slurm" and volume:
        raise CommandLineError(
            f"--volume {volume}",
            "a job of Slurm mounts no volume.",
            "Leave it out; hydra.run.dir is a folder that all nodes see.",
        )
    recipe = _recipe_of(words, hosts)
    launch, ranks, name = recipe.launch, recipe.num_ranks // hosts, _short_name(recipe.name)
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


def _recipe_of(words: Sequence[str], hosts: int) -> Recipe:
    """Return the recipe, whose hosts the file starts.  Raises RecipeError."""
    keys = compose([*words])
    if (name := keys.launch.name) in ("slurm", "ray"):
        raise CommandLineError(
            f"launch={name}", "the file starts the run itself.", f"Leave launch={name} out."
        )
    for key in ("nnodes", "node_rank", "rdzv_endpoint"):
        if keys.launch[key] not in (None, ""):
            raise RecipeError(f"launch.{key}", "--hosts says how many.", "Leave it out.")
    recipe = to_recipe(keys)
    if recipe.num_ranks % hosts:
        raise CommandLineError(
            f"--hosts {hosts}",
            f"{recipe.num_ranks} ranks cannot be divided over {hosts} hosts.",
            f"Place a multiple of {hosts} ranks, or write --hosts 1.",
        )
    return recipe


def _short_name(name: str) -> str:
    """Return a name as DNS allows it; a label of a JobSet holds it twice, in 63 characters."""
    short = re.sub(r"[^a-z0-9]+", "-", name.lower())[:26].strip("-")
    return short if short[:1].isalpha() else f"run-{short}"[:26].strip("-")


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
    failed = {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [PREEMPTED]}}
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
            "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [PREEMPTED]},
        },
        "volumes": {wanted.path: wanted.volume},
        "run": shlex.join(wanted.command),
    }
    return _yaml(task)


def _script(wanted: Wanted) -> str:
    """A job that is put back into the queue keeps its number, and with it the folder."""
    slurm, memory = wanted.slurm, wanted.slurm.mem_gb
    flags = {
        "job-name": wanted.name,
        "nodes": wanted.hosts,
        "ntasks-per-node": 1,
        "cpus-per-task": slurm.cpus_per_node or wanted.cpus,
        "gpus-per-node": slurm.gpus_per_node or wanted.gpus,
        "mem": memory and f"{math.ceil(memory * 1024)}M",
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.minutes,
        "signal": f"TERM@{wanted.grace_s}",
        "open-mode": "append",
        **{
            key.replace("_", "-"): value if isinstance(value, bool) else shlex.quote(str(value))
            for key, value in slurm.extra.items()
        },
    }
    command = shlex.join(wanted.command)
    if "hydra.run.dir=" not in command:
        command += f' "hydra.run.dir=outputs/slurm/${{SLURM_JOB_ID}}_{wanted.name}"'
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{key}{'' if v is True else f'={v}'}" for key, v in flags.items() if v),
        "#SBATCH --requeue",
        *slurm.setup,
        f"srun --cpus-per-task={flags['cpus-per-task']} {command}",  # it inherits no such flag
        "status=$?",
        f"[ $status -ne {PREEMPTED} ] || scontrol requeue $SLURM_JOB_ID",
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
