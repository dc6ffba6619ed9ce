import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrun.launcher.listeners.listener import RunInfo
from flowrun.launcher.listeners.trackers import MLflow, TensorBoard, Trackio, WandB
from flowrun.launcher.recipe.compose import load

RECIPE = {"name": "tiny", "train": {"steps": 3}}


def follow(logger: Any, folder: Path, first: int = 0, status: str = "complete") -> None:
    """Let a logger follow steps up to the third."""
    logger.on_start(RunInfo(folder=folder, name="tiny", recipe=RECIPE, first_step=first, steps=3))
    for step in range(first, 3):
        logger.on_step(step, {"loss": 3.0 - step, "lr": 0.5})
    if hasattr(logger, "on_evaluation"):
        logger.on_evaluation(2, {"loss": 0.25})
    logger.on_end(status)


def test_tensorboard_reads_every_tag(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    follow(TensorBoard(), tmp_path)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert found.Tags()["scalars"] == ["loss", "lr", "validation/loss"]
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [(0, 3), (1, 2), (2, 1)]


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of MLflow's files in a folder of their own."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a data base takes 7 s to be made
    return MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())


def only_run(client: Any) -> Any:
    found = client.get_experiment_by_name("flowrun")
    [run] = client.search_runs([found.experiment_id])
    return run


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # SQLAlchemy's, of MLflow
def test_mlflow_reads_every_tag_of_a_run_that_went_on(mlflow: Any, tmp_path: Path) -> None:
    follow(MLflow(tracking_uri=mlflow.tracking_uri), tmp_path, status="preempted")
    follow(MLflow(tracking_uri=mlflow.tracking_uri), tmp_path, first=2)
    run = only_run(mlflow)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"name": "tiny", "train.steps": "3"}
    assert run.data.metrics == {"loss": 1, "lr": 0.5, "validation/loss": 0.25}
    losses = mlflow.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in losses] == [(0, 3), (1, 2), (2, 1), (2, 1)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # SQLAlchemy's, of MLflow
def test_mlflow_takes_a_recipe_with_pins(mlflow: Any, tmp_path: Path) -> None:
    logger = MLflow(tracking_uri=mlflow.tracking_uri)
    keys = yaml.safe_load(load(["recipe=gpt_hybrid"]).to_yaml())
    keys["sbp"]["wte*"] = {"weight": {"tensor": "S(0)"}}
    keys["sbp"]["wte?"] = {"weight": {"tensor": "B"}}
    logger.on_start(RunInfo(folder=tmp_path, name="pins", recipe=keys, first_step=0, steps=3))
    logger.on_step(0, {"loss": 3.0, "top@1": 0.5})
    logger.on_end("failed")
    run = only_run(mlflow)
    assert run.data.params["sbp.blocks._.attn.qkv.weight.tensor"] == "S(0)"
    assert run.data.params["sbp.wte_.weight.tensor"] == "S(0)"
    assert run.data.params["sbp.wte_.weight.tensor_2"] == "B"
    assert run.data.metrics == {"loss": 3.0, "top_1": 0.5}
    assert run.info.status == "FAILED"


def test_trackio_reads_every_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    for module in (trackio, trackio.utils, trackio.sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    follow(Trackio(), tmp_path)
    [name] = SQLiteStorage.get_runs("flowrun")
    logs = SQLiteStorage.get_logs("flowrun", name)
    losses = [(line["step"], line["loss"]) for line in logs if "loss" in line]
    assert losses == [(0, 3), (1, 2), (2, 1)]
    assert [line["validation/loss"] for line in logs if "validation/loss" in line] == [0.25]


def records(file: Path) -> Iterator[Any]:
    """Records of a .wandb file: blocks of 32 kB, in them a checksum, a length and a kind each."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, held = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        held += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(held)
            yield record
            held = b""


def test_wandb_reads_every_tag(tmp_path: Path) -> None:
    import wandb

    follow(WandB(mode="offline"), tmp_path)
    wandb.teardown()  # its process has written all
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = [
        {(item.key or item.nested_key[0]): item.value_json for item in each.history.item}
        for each in records(file)
        if each.HasField("history")
    ]
    steps = [(line["step"], line["loss"], line["lr"]) for line in found if "loss" in line]
    assert steps == [("0", "3", "0.5"), ("1", "2", "0.5"), ("2", "1", "0.5")]
    assert [line["validation/loss"] for line in found if "validation/loss" in line] == ["0.25"]
