"""The rest of a run on the hosts that are left."""

from unittest.mock import Mock

import pytest

from flowrun.launcher.place.settle import Replan
from flowrun.launcher.recipe.compose import load

FOUR_NODES = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_NODELIST": "n[0-3]",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_PROCID": "0",
}


@pytest.mark.parametrize(("hosts", "endpoint"), [(2, "n0"), (1, "")])
def test_hosts_of_a_platform_that_are_left_keep_its_endpoint(
    hosts: int, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in FOUR_NODES.items():
        monkeypatch.setenv(key, value)
    batch = ("train.batch_size=12", "train.micro_batches=1")
    layout = ("placement.axes={data: 4, tensor: 1}", "placement.stages=1")
    asked = load(["recipe=gpt_hybrid", "launch.nnodes='1:4'", *layout, *batch])
    record = Mock(asked=asked, job=Mock(recipe=asked))
    found = Replan(record).for_hosts(hosts, None).job.recipe
    assert (found.launch.num_hosts, found.num_ranks) == (hosts, hosts)
    assert found.launch.rdzv_endpoint.partition(":")[0] == endpoint
    assert found.seat.notes == asked.seat.notes
