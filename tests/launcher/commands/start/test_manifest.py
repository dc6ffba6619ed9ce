"""Files for platforms, reviewed like code: manifests/*; FLOWRUN_REGENERATE=1 writes them.

Their shape is checked by the models of kubeflow-trainer-api, which has those of JobSet and
Kubernetes, too.  SkyPilot's task was checked by sky/utils/schemas.py of 0.14.1.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api import models

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.start.manifest import MANIFESTS, write_manifest

GOLDEN = Path(__file__).resolve().parent / "manifests"
WORDS = ("recipe=gpt_hybrid", "launch.device=cuda", "launch.grace_s=300", "model.depth=2")


def written(platform: str, *words: str, volume: str | None = None, hosts: int = 2) -> str:
    if volume is None:
        volume = "" if platform == "slurm" else "claim:/runs"
    return write_manifest(platform, [*WORDS, *words], hosts, "registry/flowrun:1", volume, "H100")


@pytest.mark.parametrize("platform", MANIFESTS)
def test_the_file_is_the_golden_one(platform: str) -> None:
    file, found = GOLDEN / f"{platform}.txt", written(platform)
    if os.environ.get("FLOWRUN_REGENERATE"):
        file.write_text(found)
    assert found.splitlines() == file.read_text().splitlines()


@pytest.mark.parametrize("platform", ["kubernetes", "kubeflow"])
def test_the_types_of_the_platform_take_it_and_lose_no_key(platform: str) -> None:
    kinds = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob"}
    kinds["TrainingRuntime"] = "TrainerV1alpha1TrainingRuntime"
    for document in yaml.safe_load_all(written(platform)):
        read = getattr(models, kinds[document["kind"]]).from_dict(document)
        assert json.loads(json.dumps(read.to_dict(), default=str)) == document


def pod_of(platform: str, *words: str) -> Any:
    first = next(yaml.safe_load_all(written(platform, *words)))["spec"]
    jobs = first if platform == "kubernetes" else first["template"]["spec"]
    return jobs["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("platform", ["kubernetes", "kubeflow"])
def test_a_pod_has_what_the_ranks_of_a_host_need(platform: str) -> None:
    pod = pod_of(platform)
    assert pod["terminationGracePeriodSeconds"] > 300  # launch.grace_s
    (container,) = pod["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert container["command"][-1] == "hydra.run.dir=/runs/gpt-hybrid"
    cores = pod_of(platform, "launch.device=cpu", "launch.threads=3")["containers"][0]
    assert cores["resources"] == {"limits": {"cpu": 6}}
    own = pod_of(platform, "hydra.run.dir=/runs/mine")["containers"][0]["command"]
    assert [word for word in own if "run.dir" in word] == ["hydra.run.dir=/runs/mine"]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RecipeError, match="a disk that all of them see"):
        written("kubernetes", volume="")
    with pytest.raises(RecipeError, match="kubernetes, kubeflow, skypilot or slurm"):
        written("k8s")
    with pytest.raises(RecipeError, match="mounts no volume"):
        written("slurm", volume="claim:/runs")
    with pytest.raises(RecipeError, match="4 ranks cannot be divided over 3 hosts") as hosts:
        written("slurm", hosts=3)
    assert hosts.value.where == "--hosts 3"
    with pytest.raises(RecipeError, match="the file starts the run itself"):
        written("slurm", "launch=slurm")
    for word in ("launch.nnodes=2", "launch.node_rank=0", "launch.rdzv_endpoint=a:1"):
        with pytest.raises(RecipeError, match="hosts says how many"):
            written("kubernetes", word)


NAMES = {"A" * 80: "a" * 26, "7_b": "run-7-b", "層": "run", "x" * 25 + "_y": "x" * 25}


@pytest.mark.parametrize(("name", "short"), NAMES.items())
def test_a_name_is_one_that_a_cluster_takes(name: str, short: str) -> None:
    """It begins with a letter, and twice in a label of a JobSet it has at most 63 characters."""
    found = yaml.safe_load(written("kubernetes", f"name='{name}'"))["metadata"]["name"]
    assert found == short and len(f"{found}-node-0-0.{found}") <= 63


def test_keys_of_slurm_are_flags_and_lines_of_the_script() -> None:
    keys = ("mem_gb=1.5", "cpus_per_node=7", "gpus_per_node=3", "setup=[module load cuda]")
    extra = ("extra.exclusive=true", "extra.mail_type=END", "extra.x=false", "extra.comment='a b'")
    lines = written("slurm", *(f"launch.slurm.{key}" for key in (*keys, *extra))).splitlines()
    flags = ("mem=1536M", "cpus-per-task=7", "gpus-per-node=3", "exclusive", "mail-type=END")
    assert not any("--x" in line for line in lines)
    assert {f"#SBATCH --{flag}" for flag in (*flags, "comment='a b'")} < {*lines}
    setup = lines.index("module load cuda")
    assert lines[setup - 1] == "#SBATCH --requeue"
    assert lines[setup + 1].startswith("srun --cpus-per-task=7 flowrun ")
