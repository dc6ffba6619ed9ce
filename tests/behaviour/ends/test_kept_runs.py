"""Runs whose folder is kept in a real S3 server."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from flowrun.launcher.data.corpus.tokens import write_tokens
from flowrun.launcher.store import weight_files as weights
from flowrun.launcher.store.checkpoint import find_all
from flowrun.launcher.store.kept_run import whole_checkpoints
from flowrun.launcher.urls.object_store import ObjectStore
from support.checks.thorough import few
from support.runs.command import Command, losses, run_folder
from support.runs.store_server import FaultyProxy, access, faulty_proxy, s3_server
from support.samples.small_tokenizer import save_tokenizer

pytestmark = pytest.mark.processes

RUN = ("recipe=small", "train.save_every=2", "eval.batches=0", "optim=adamw")
STEPS = "train.steps=8"
RECIPE = """\
defaults: [/data: tokens, /optim: sgd, /launch: local]
model: {_target_: bag.Bag}
task: {inputs: {tokens: tokens}, loss: {_target_: bag.first}}
placement: {axes: {data: 1}}
engine: {check_capture: false}
"""
BAG = """\
from torch import nn
from torch.nn.functional import cross_entropy


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(32, 4), nn.Linear(4, 32)

    def forward(self, tokens):
        return self.out(self.embed(tokens[:, :16]).mean(1))


def first(output, batch):
    return cross_entropy(output, batch["targets"][:, 0])
"""


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with faulty_proxy(server, every=0) as proxy:
        for name, value in access(proxy.server_address[1]).items():
            monkeypatch.setenv(name, value)
        yield proxy


def test_a_run_that_is_killed_while_it_is_put_continues_from_the_store(
    place: Path, proxy: FaultyProxy
) -> None:
    whole, store = place / "whole", "train.store=s3://bucket/killed"
    assert Command(place, *RUN, STEPS, run_folder(whole)).end().status == 0
    again = (*RUN, store, "train.resume=auto")
    begun = (*again, run_folder(place / "killed"))
    assert Command(place, *begun, "train.steps=4").end().status == 0
    proxy.holds = "step_00000008/rank00001.safetensors"
    run = Command(place, *begun, STEPS)
    assert proxy.held.wait(60)
    run.send(signal.SIGKILL, group=True)
    run.end()
    proxy.holds = ""
    proxy.every = 10
    there = max(whole_checkpoints(ObjectStore.open("s3://bucket/killed", "x").find()))
    assert there in (4, 6)
    ended = Command(place, *again, STEPS, run_folder(place / "new")).end()
    assert (ended.status, ended.err) == (0, "")
    assert f"goes on from step {there}" in ended.out
    assert losses(place / "new") == losses(whole)

    # Another machine reads it, in another layout too.
    other = (*again, "train.steps=12", "placement.axes={data: 2}", run_folder(place / "other"))
    ended = Command(place, *other).end()
    assert (ended.status, ended.err) == (0, "") and "goes on from step 8" in ended.out
    assert losses(place / "other")[:8] == losses(whole) and len(losses(place / "other")) == 12
    ended = Command(place, "export", "s3://bucket/killed", "--to", "w.safetensors").end()
    assert (ended.status, ended.err) == (0, "")
    expected = weights.load(place / "other")
    (place / "exported").mkdir()
    (place / "w.safetensors").rename(place / "exported" / weights.FILE)
    exported = weights.load(place / "exported")
    assert all(torch.equal(exported[name], expected[name]) for name in expected)


@pytest.mark.thorough
def test_a_restart_forks_beside_what_is_put(place: Path, proxy: FaultyProxy) -> None:
    proxy.every = 10
    ended = Command(
        place,
        *RUN,
        STEPS,
        "data.fail=kill once",
        "launch.restarts=1",
        "train.store=s3://bucket/restarted",
        run_folder(place / "run"),
    ).end()
    assert ended.status == 0, ended.err
    assert "s3://bucket/restarted has all files of the run" in ended.out
    ended = Command(place, "runs", "s3://bucket/restarted").end()
    assert "complete" in ended.out
    ended = Command(place, "resume", "s3://bucket/restarted", "train.steps=10", "--step=6").end()
    assert "note: step_00000008 is left out: the next checkpoint replaces it" in ended.out
    (folder,) = (place / "outputs").glob("*/*_restarted")
    assert ended.status == 0 and [kept.step for kept in find_all(folder)] == [8, 10]
    assert losses(folder)[:8] == losses(place / "run")


@pytest.mark.parametrize("kind", few(["tokens", "text_rows", "parquet"], often=["tokens"]))
def test_training_reads_data_and_weights_of_a_url(
    place: Path, proxy: FaultyProxy, kind: str
) -> None:
    """And continues in another layout, from the store, with the samples of a disk."""
    save_tokenizer(place / "bpe")
    write_tokens(place / "tokens.bin", [[7 * k % 280 for k in range(2000)]])
    rows = [{"text": f"the cat sat on the mat {k} times"} for k in range(300)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), place / "text_rows.parquet")
    ids = [{"tokens": [7 * k % 280] * 8, "targets": [k % 280] * 8} for k in range(200)]
    parquet.write_table(pyarrow.Table.from_pylist(ids), place / "parquet.parquet", row_group_size=9)
    (file,) = place.glob(f"{kind}.*")
    ObjectStore.open("s3://bucket/data", "x").put(file.name, file)
    proxy.every = 10
    data = [f"data={kind}", *(["data.tokenizer=bpe"] if kind == "text_rows" else [])]
    net = ("model.depth=1", "model.width=16", "model.heads=2", "model.vocabulary=288")
    more = (
        "train.save_every=4",
        "eval.batches=0",
        "model.context=8" if kind == "parquet" else "data.length=8",
    )
    run = ("recipe=gpt_dp", *data, *net, *more)
    disk, url = f"data.path={file}", f"data.path=s3://bucket/data/{file.name}"
    ends = []
    for name, where in (("disk", disk), ("url", url)):
        store = f"train.store=s3://bucket/{kind}/{name}"
        first = Command(place, *run, where, store, "train.steps=4", run_folder(place / name)).end()
        other = ("train.steps=8", "placement.axes={tensor: 2}")
        second = Command(place, "resume", f"s3://bucket/{kind}/{name}", *other).end()
        assert (first.status, second.status) == (0, 0), first.err + second.err
        (folder,) = (place / "outputs").glob(f"*/*_{name}")
        ends.append(losses(folder))
    assert len(ends[0]) == 8 and ends[0] == ends[1]
    begun = (disk, f"model.weights=s3://bucket/{kind}/url/weights.safetensors", "train.steps=1")
    ended = Command(place, *run, *begun, run_folder(place / "w")).end()
    assert ended.status == 0 and losses(place / "w")[0] < ends[0][0], ended.err


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["tokens", "parquet"])
def test_data_that_is_larger_than_what_is_kept_of_it_trains_for_three_epochs(
    place: Path, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """And continues in another layout, with the samples of the disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    (place / "bag.py").write_text(BAG)
    (place / "bag.yaml").write_text(RECIPE)
    file, ids = place / f"data.{kind}", np.tile(np.uint16(np.arange(200_000) * 7 % 31), 60)
    if kind == "tokens":
        write_tokens(file, [ids])
    else:
        rows = np.lib.stride_tricks.sliding_window_view(ids, 8193)[::8192]
        fields = {"tokens": [*rows[:, :-1]], "targets": [*rows[:, 1:2]]}
        plain: dict[str, Any] = {"compression": "none", "use_dictionary": False}
        parquet.write_table(pyarrow.table(fields), file, 100, **plain)
    ObjectStore.open("s3://bucket/larger", "x").put(file.name, file)
    most = [0]

    def measure() -> str:
        blocks = [*(place / "cache").rglob("blocks/*")]
        most[0] = max(most[0], sum(file.stat().st_size for file in blocks if file.exists()))
        return ""

    monkeypatch.setattr(proxy, "fault", measure)
    order = "{_target_: flowrun.models.sampling.draw_in_blocks, block: 100, mixed: 2}"
    held = "data.length=8192" if kind == "tokens" else "data.held_bytes=20000000"
    keys = (f"data={kind}", held, f"+data.order={order}", "data.cache_bytes=9000000")
    run = ("recipe=bag.yaml", *keys, "eval.batches=0", "train.batch_size=61", "train.save_every=36")
    for name, where in (("disk", file), ("url", f"s3://bucket/larger/{file.name}")):
        begun = (*run, f"data.path={where}", "train.steps=36", run_folder(place / name))
        other = (str(place / name), "train.steps=72", "placement.axes={tensor: 2}")
        first, second = Command(place, *begun).end(), Command(place, "resume", *other).end()
        assert (first.status, second.status) == (0, 0), first.err + second.err
    measure()
    assert len(losses(place / "url")) == 72 and losses(place / "url") == losses(place / "disk")
    assert 4_000_000 < most[0] <= 9_000_000 < file.stat().st_size / 2


def test_ctrl_c_ends_the_wait_for_the_store(place: Path, proxy: FaultyProxy) -> None:
    proxy.holds = "weights.safetensors"
    run = Command(place, *RUN, STEPS, "train.store=s3://bucket/stopped", run_folder(place / "run"))
    run.until("waiting until s3://bucket/stopped has the files of the run")
    assert run.signal(signal.SIGINT).status == 130


def test_a_store_that_cannot_be_used_is_refused_before_the_run(
    place: Path, proxy: FaultyProxy
) -> None:
    ended = Command(place, *RUN, STEPS, "hydra.run.dir=s3://bucket/x").end()
    assert ended.status == 2 and "Write train.store, under which the folder is kept" in ended.err
    ended = Command(place, *RUN, STEPS, "train.store=s3://none/x", run_folder(place / "run")).end()
    assert ended.status == 2 and not (place / "run").exists()
    first, problem, instead = ended.err.splitlines()
    assert first.endswith("train.store = s3://none/x")
    assert problem.endswith("The specified bucket does not exist.")
    assert instead.startswith("  Write the URL of a bucket that exists")
