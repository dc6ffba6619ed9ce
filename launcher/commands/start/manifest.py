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
from collections.abc import Mapping, Sequence

import yaml  # type: ignore[import-untyped]

from flowrun.engine.errors import RecipeError
from flowrun.launcher.recipe.compose import compose, to_recipe
from flowrun.launcher.recipe.recipe import Recipe
from flowrun.launcher.recipe.recipe_errors import CommandLineError, one_of
from flowrun.launcher.recipe.schema import Slurm
from flowrun.launcher.terminal.exit_status import PREEMPTED

_MARGIN_S = 10
# a pod that ends with anything but 75 fails the job, and so the set; else all begin again
_SET = """
coordinator: $coordinator
failurePolicy:
  maxRestarts: 0
  rules:
  - name: again
    action: RestartJobSetAndIgnoreMaxRestarts
    onJobFailureReasons: [BackoffLimitExceeded]
replicatedJobs:
- name: node
  template:
    metadata: $labels
    spec:
      parallelism: $hosts
      completions: $hosts
      completionMode: Indexed
      backoffLimit: 0
      podFailurePolicy:
        rules:
        - {action: Count, onPodConditions: [{type: DisruptionTarget, status: 'True'}]}
        - {action: FailJob, onExitCodes: {operator: NotIn, values: [$again]}}
      template:
        spec:
          restartPolicy: Never
          terminationGracePeriodSeconds: $grace_s
          containers:
          - name: node
            image: $image
            command: $command
            env: $variables
            resources: {limits: $limits}
            volumeMounts: [{name: runs, mountPath: $path}]
          volumes: [{name: runs, persistentVolumeClaim: {claimName: $volume}}]
"""
_JOBSET = """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: $name}
spec: $set
"""
# with a runtime of its own, as a TrainJob has no rules for statuses
_TRAINJOB = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata: {name: $name}
spec:
  mlPolicy: {numNodes: $hosts, torch: {}}
  template: {spec: $set}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: $name}
spec: {runtimeRef: {kind: TrainingRuntime, name: $name}}
"""
_TASK = """
name: $name
num_nodes: $hosts
resources:
  image_id: $docker_image
  $device: $devices
  job_recovery: {max_restarts_on_errors: 0, recover_on_exit_codes: [$again]}
volumes: {$path: $volume}
run: $line
"""
# what the set of one platform has, and that of the other lacks
_OWN = {
    "kubernetes": """
coordinator: {replicatedJob: node}
variables:
- {name: NNODES, value: $count}
- name: MASTER_ADDR
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['jobset.sigs.k8s.io/coordinator']"}}
""",
    "kubeflow": "labels: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}",
}
# a script of sbatch is made of flags
MANIFESTS = {"kubernetes": _JOBSET, "kubeflow": _TRAINJOB, "skypilot": _TASK, "slurm": ""}


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
    gpus, cpus = ranks * (launch.device == "cuda"), ranks * (launch.threads + launch.data_workers)
    command = ["flowrun", *words, "train.resume=auto"]
    chosen = any(text.lstrip("+").startswith("hydra.run.dir=") for text in words)
    if platform != "slurm" and not chosen:
        command.append(f"hydra.run.dir={path}/{name}")
    values: dict[str, object] = {
        "name": name,
        "hosts": hosts,
        "count": str(hosts),
        "grace_s": math.ceil(launch.grace_s) + _MARGIN_S,
        "again": PREEMPTED,
        "command": command,
        "line": shlex.join(command),
        "image": image,
        "docker_image": f"docker:{image}",
        "volume": disk,
        "path": path,
        "cpus": cpus,
        "gpus": gpus,
        "limits": {"nvidia.com/gpu": gpus} if gpus else {"cpu": cpus},
        "device": "accelerators" if gpus else "cpus",
        "devices": f"{gpu}:{gpus}" if gpus else f"{cpus}+",
    }
    if platform == "slurm":
        folder = "" if chosen else f' "hydra.run.dir=outputs/slurm/${{SLURM_JOB_ID}}_{name}"'
        return _script(values, launch.slurm, shlex.join(command) + folder)
    own = yaml.safe_load(_OWN.get(platform, "{}"))
    values |= {key: _fill(part, values) for key, part in own.items()}
    values["set"] = _fill(yaml.safe_load(_SET), values)
    documents = _fill([*yaml.safe_load_all(MANIFESTS[platform])], values)
    return str(yaml.safe_dump_all(documents, sort_keys=False, width=1000))


def _fill(part: object, values: Mapping[str, object]) -> object:
    """Return a part of a template with values in place of $NAMES; a key without one is left out."""
    if isinstance(part, list):
        return [_fill(each, values) for each in part]
    if isinstance(part, dict):
        filled = {_fill(key, values): _fill(value, values) for key, value in part.items()}
        return {key: value for key, value in filled.items() if value is not None}
    if isinstance(part, str) and part.startswith("$"):
        return values.get(part[1:])
    return part


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


def _script(values: Mapping[str, object], slurm: Slurm, command: str) -> str:
    """A job that is put back into the queue keeps its number, and with it the folder."""
    flags = {
        "job-name": values["name"],
        "nodes": values["hosts"],
        "ntasks-per-node": 1,
        "cpus-per-task": slurm.cpus_per_node or values["cpus"],
        "gpus-per-node": slurm.gpus_per_node or values["gpus"],
        "mem": slurm.mem_gb and f"{math.ceil(slurm.mem_gb * 1024)}M",
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.minutes,
        "signal": f"TERM@{values['grace_s']}",
        "open-mode": "append",
        **{
            key.replace("_", "-"): value if isinstance(value, bool) else shlex.quote(str(value))
            for key, value in slurm.extra.items()
        },
        "requeue": True,
    }
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{key}{'' if v is True else f'={v}'}" for key, v in flags.items() if v),
        *slurm.setup,
        f"srun --cpus-per-task={flags['cpus-per-task']} {command}",  # it inherits no such flag
        "status=$?",
        f"[ $status -ne {PREEMPTED} ] || scontrol requeue $SLURM_JOB_ID",
        "exit $status",
    ]
    return "\n".join((*lines, ""))
