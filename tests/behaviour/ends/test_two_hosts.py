"""Two hosts: two launchers on loopback, each with its own folder and half of the ranks."""

import json
import os
import platform
import re
import signal
from contextlib import closing
from pathlib import Path

import pytest
import torch

from flowrun.launcher.commands.run_folders.run_summary import find_status
from flowrun.launcher.model.build import describe_model, instantiate_model
from flowrun.launcher.model.replay import View
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.store import weight_files as weights
from support.runs.command import Command, Ended, free_port, losses, run_folder
from support.runs.linked_hosts import LinkedHosts, find_obstacle

pytestmark = pytest.mark.processes

HYBRID = ("recipe=gpt_hybrid", "train.steps=3", "model.depth=2", "model.width=32", "data.length=16")
# cut by time, stages depend on how many ranks share the cores of a host
STAGES = (
    "placement.stages=[{modules: [embed, blocks.0], ranks: [[0, 1]]}, "
    "{modules: [blocks.1, norm, head], ranks: [[2, 3]]}]"
)


def hosts(
    place: Path, *arguments: str, fresh: bool = False, linked: LinkedHosts | None = None
) -> list[Command]:
    """The same command on two hosts; host k writes to the folder host{k}.

    fresh: Python starts the second (see Command), so that hashes differ.  linked: their networks;
    None: both are on loopback.
    """
    endpoint = linked.endpoint if linked else f"127.0.0.1:{free_port()}"
    meet = ("launch.nnodes=2", f"launch.rdzv_endpoint={endpoint}")
    networks = linked.namespaces if linked else ("", "")
    return [
        Command(
            place,
            *arguments,
            *meet,
            run_folder(place / f"host{host}"),
            fresh=fresh and host == 1,
            namespace=network,
        )
        for host, network in enumerate(networks)
    ]


@pytest.mark.thorough
def test_two_hosts_train_gpt_hybrid_as_one_does(tmp_path: Path) -> None:
    hybrid = (*HYBRID, STAGES)
    ends = [command.end() for command in hosts(tmp_path, *hybrid, fresh=True)]
    assert [(ended.status, ended.err) for ended in ends] == [(0, ""), (0, "")]
    as_far = "launch.transport=gloo"  # by a faster link other layouts are cheapest: other last bits
    assert Command(tmp_path, *hybrid, as_far, run_folder(tmp_path / "one")).end().status == 0
    one = json.loads((tmp_path / "one" / "report.json").read_text())
    for folder in (tmp_path / "host0", tmp_path / "host1"):
        assert losses(folder) == losses(tmp_path / "one")
        report = json.loads((folder / "report.json").read_text())
        assert report["validation"] == one["validation"]
        # its ranks share fewer cores than those of one host: layouts of equal loss may differ
        assert report["measured"]["sent_bytes"] == report["foreseen"]["sent_bytes"]
        assert all(report["measured"]["peak_bytes"].values())
    _check_weights(tmp_path, ends)


def _check_weights(place: Path, ends: list[Ended]) -> None:
    """The first host has collected the shards of all ranks, and the other says so."""
    said = [ended.out.count("the weights are in the folder of host 0") for ended in ends]
    assert sorted(said) == [0, 1]
    joined, one = _joined(place), weights.load(place / "one")
    assert joined.keys() == one.keys()
    assert all(torch.equal(joined[name], one[name]) for name in one)
    assert not list(place.glob("host?/weights.rank*"))


def _joined(place: Path) -> dict[str, torch.Tensor]:
    """What the first host made of both hosts' shards."""
    (folder,) = [file.parent for file in place.glob(f"host?/{weights.FILE}")]
    return weights.load(folder)


def test_weights_that_two_hosts_make_are_those_of_plain_torch(tmp_path: Path) -> None:
    """At a learning rate that no float32 can have a run ends with what its ranks began with."""
    wide = ("recipe=gpt_hybrid", "model.depth=2", "model.width=128", "data.length=16")
    still = (*wide, "optim.lr=1e-50", "train.steps=1", "eval.batches=0")
    recipe = load(list(still))
    described = describe_model(recipe)
    deferred = [n for n, source in described.initial.sources.items() if isinstance(source, View)]
    assert {"embed.wte.weight", "blocks.0.mlp.fc1.weight"} <= set(deferred)
    ends = [command.end() for command in hosts(tmp_path, *still)]
    assert [(ended.status, ended.err) for ended in ends] == [(0, "")] * 2
    made, plain = _joined(tmp_path), instantiate_model(recipe).state_dict()
    assert made.keys() == plain.keys()
    assert all(torch.equal(made[name], plain[name]) for name in plain)


NAME = platform.node()


def test_both_hosts_name_the_rank_that_failed(place: Path) -> None:
    commands = hosts(place, "recipe=small", "train.steps=1000", "+data.fail=raise")
    ends = [command.end() for command in commands]
    for ended in ends:
        assert ended.status == 1
        where, problem, *_ = ended.err.splitlines()
        assert re.fullmatch(rf"host [01] \({NAME}\), rank 1, actor batch", where)
        assert problem == "  ValueError: sample 40 is not there"
    assert len({ended.err for ended in ends}) == 1
    logs = [log.read_text() for log in place.glob("host?/logs/rank_1.log")]
    assert len(logs) == 1
    assert "ValueError: sample 40 is not there" in logs[0]


def test_both_hosts_name_a_rank_that_is_killed_and_end(place: Path) -> None:
    commands = hosts(place, "recipe=small", "train.steps=1000", "+data.fail=kill")
    ends = [command.end() for command in commands]
    assert all(
        re.match(rf"host [01] \({NAME}\), rank 1\n  the process was killed", e.err) for e in ends
    )
    said = [(ended.status, ended.err.count("\n")) for ended in ends]
    assert said == [(1, 2), (1, 2)]  # nothing of torch


def test_a_launcher_that_is_killed_is_named_by_the_other_host(place: Path) -> None:
    first, second = hosts(place, "recipe=small", "train.steps=1000000")
    for command in (first, second):
        command.until("step 0")
    assert first.listens_at() | second.listens_at() == {"127.0.0.1"}  # the endpoint's interface
    assert first.signal(signal.SIGKILL).status == -signal.SIGKILL
    ended = second.end(within=5)
    assert ended.status == 1
    where, problem = ended.err.splitlines()
    assert re.fullmatch(rf"host [01] \({NAME}\)", where)
    assert problem == "  its launcher has ended: it was killed, or its machine failed."


@pytest.mark.skipif(bool(find_obstacle()), reason=f"no networks of their own: {find_obstacle()}")
def test_hosts_that_a_cut_link_parts_name_each_other(place: Path) -> None:
    with closing(LinkedHosts()) as linked:
        run = ("recipe=small", "train.steps=1000000", "launch.hang_s=3")
        commands = hosts(place, *run, linked=linked)
        for command in commands:
            command.until("step 0")
        linked.cut(0)
        ends = [command.end(within=15) for command in commands]
    for host, ended in enumerate(ends):
        *_, where, problem = ended.err.splitlines()  # torch misses a name server there
        assert re.fullmatch(rf"host {1 - host} \({NAME}\)", where)
        assert problem == "  nothing came from it for 3 s: it hangs, or the network is down."


def test_hosts_leave_and_join_and_the_losses_are_those_of_one_process(place: Path) -> None:
    run = ("recipe=small", "train.steps=48", "train.save_every=4")
    meet = ("launch.nnodes=1:2", f"launch.rdzv_endpoint=127.0.0.1:{free_port()}")
    command = (*run, *meet, run_folder(place / "out"))
    first, second = Command(place, *command), Command(place, *command)
    for launcher in (first, second):
        launcher.until("step 0/")
    assert second.signal(signal.SIGKILL).status == -signal.SIGKILL
    os.mkfifo(place / "hold")
    first.until("1 host from step")
    third = Command(place, *command)
    third.until("waiting for hosts that finish their step")  # its ranks wait for samples
    with open(place / "hold", "w"):
        os.unlink(place / "hold")
        for launcher in (first, third):
            ended = launcher.end()
            assert (ended.status, ended.err) == (0, "")
    lines = (place / "out" / "restarts.jsonl").read_text().splitlines()
    expected = ["its launcher has ended", f"a host joins ({NAME})."]
    assert [json.loads(line)["problem"].split(":")[0] for line in lines] == expected
    whole = Command(place, *run, "launch=virtual", run_folder(place / "whole")).end()
    assert whole.status == 0
    assert losses(place / "out") == pytest.approx(losses(place / "whole"), rel=1e-4)


@pytest.mark.thorough
def test_another_run_into_the_folder_of_two_hosts_is_refused(place: Path) -> None:
    meet = ("launch.nnodes=2", f"launch.rdzv_endpoint=127.0.0.1:{free_port()}")
    endless, folder = ("recipe=small", "train.steps=1000000"), run_folder(place / "out")
    both = [Command(place, *endless, *meet, folder) for _ in range(2)]
    for command in both:
        command.until("step 0/")
    before = (place / "out" / "recipe.yaml").read_text()
    assert find_status(place / "out") == "running"
    refused = Command(place, *endless, "optim.lr=0.5", folder).end()
    assert refused.status == 2 and "another run is writing to" in refused.err
    assert (place / "out" / "recipe.yaml").read_text() == before
    both[0].send(signal.SIGTERM)
    assert [command.end().status for command in both] == [75, 75]
