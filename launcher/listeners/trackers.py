"""TensorBoard's events in the run's folder; experiment trackers: Weights & Biases, MLflow, trackio.
Each is imported when a run starts that names it.

A run that goes on, by resume or as ranks were started again, goes on in the tracker, too: its
number there lies in the run's folder.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrun.launcher.listeners.listener import Curves, RunInfo
from flowrun.launcher.recipe.key_schema import flatten_keys


class TensorBoard(Curves):
    """Writes a curve for each tag."""

    def __init__(self) -> None:
        self._writer: Any = None

    def on_start(self, run: RunInfo) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        from torch.utils.tensorboard import SummaryWriter

        _hush_writer()
        self._writer = SummaryWriter(str(run.folder), purge_step=run.first_step or None)

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def on_end(self, status: str) -> None:
        self._writer.close()


def _hush_writer() -> None:
    """Let TensorBoard's own thread end without a traceback where it cannot write: the next event
    raises the error, which is a note.
    """
    before = threading.excepthook

    def show(ended: threading.ExceptHookArgs) -> None:
        if not type(ended.thread).__module__.startswith("tensorboard"):
            before(ended)

    threading.excepthook = show


_FLUSH_S = 1.0  # from one batch of MLflow to the next
_PARAMETER_CHARACTERS = 500  # of a value; MLflow refuses more than 6000
_KEY_CHARACTERS = 240  # of a key; MLflow refuses more than 250
_REFUSED = re.compile(r"[^\w. /-]")  # by MLflow, in a key; colons, on Windows
_PARAMETERS, _METRICS = 100, 1000  # MLflow takes no more at once


class WandB(Curves):
    """Weights & Biases.  options: of wandb.init, such as project, mode ("offline"), tags."""

    def __init__(self, **options: Any) -> None:
        self._options = {"project": "flowrun", **options}
        self._run: Any = None

    def on_start(self, run: RunInfo) -> None:
        import wandb

        known = _Number(run, "wandb")
        settings = {
            "name": run.name,
            "dir": str(run.folder),
            "config": dict(run.recipe),
            "id": known.read() or None,
            "resume": "allow",
        }
        self._run = wandb.init(**settings | self._options)
        known.write(self._run.id)
        self._run.define_metric("step")  # and not wandb's own, which cannot go back
        self._run.define_metric("*", step_metric="step")

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def on_end(self, status: str) -> None:
        self._run.finish(exit_code=int(status == "failed"))


class MLflow(Curves):
    """MLflow.

    tracking_uri: a server, or where files lie (sqlite:///FILE); None: as the environment says.
    experiment: its name there.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "flowrun") -> None:
        self._uri, self._experiment = tracking_uri, experiment
        self._client: Any = None
        self._number = ""
        self._metrics: list[Any] = []
        self._written = 0.0

    def on_start(self, run: RunInfo) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        known = _Number(run, "mlflow")
        if number := known.read():
            self._number = number
            return
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else None
        experiment = experiment or self._client.create_experiment(self._experiment)
        self._number = self._client.create_run(experiment, run_name=run.name).info.run_id
        known.write(self._number)
        params = _make_params(run.recipe)
        for k in range(0, len(params), _PARAMETERS):
            self._client.log_batch(self._number, params=params[k : k + _PARAMETERS])

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = time.time()
        self._metrics += [
            Metric(_REFUSED.sub("_", name), value, int(1000 * now), step)
            for name, value in values.items()
        ]
        if now - self._written > _FLUSH_S:
            self._flush()
            self._written = now

    def on_end(self, status: str) -> None:
        named = {"complete": "FINISHED", "failed": "FAILED", "restarted": "RUNNING"}
        try:
            self._flush()
        finally:
            self._client.set_terminated(self._number, named.get(status, "KILLED"))

    def _flush(self) -> None:
        """Write what was not; it is not tried again if that fails."""
        metrics, self._metrics = self._metrics, []
        for k in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._number, metrics=metrics[k : k + _METRICS])


def _make_params(recipe: Mapping[str, Any]) -> list[Any]:
    """Return the keys of a recipe as MLflow's parameters.

    `_` stands for each character that it refuses; a key that has become like another has a number.
    """
    from mlflow.entities import Param

    found: dict[str, Any] = {}
    for key, value in flatten_keys(recipe):
        name = short = _REFUSED.sub("_", key).replace("/", "_")[:_KEY_CHARACTERS]
        same = 1
        while name in found:
            same += 1
            name = f"{short}_{same}"
        found[name] = Param(name, str(value)[:_PARAMETER_CHARACTERS])
    return list(found.values())


class Trackio(Curves):
    """trackio, in its folder of this machine (TRACKIO_DIR), or in a space of Hugging Face.

    options: of trackio.init, such as project, space_id.
    """

    def __init__(self, **options: Any) -> None:
        self._options = {"project": "flowrun", **options}
        self._run: Any = None

    def on_start(self, run: RunInfo) -> None:
        import trackio

        known = _Number(run, "trackio")
        name = known.read() or f"{run.name}-{run.folder.absolute().name}"
        settings = {"name": name, "config": dict(flatten_keys(run.recipe)), "resume": "allow"}
        self._run = trackio.init(**settings | self._options)
        known.write(name)

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def on_end(self, status: str) -> None:
        self._run.finish()


class _Number:
    """The number of a run in a tracker, in a file of the run's folder."""

    def __init__(self, run: RunInfo, tracker: str) -> None:
        self._file: Path = run.folder / f"{tracker}_run.txt"
        self._goes_on = run.first_step > 0

    def read(self) -> str:
        """Return the number of the run that goes on; empty of one that begins."""
        return self._file.read_text().strip() if self._goes_on and self._file.exists() else ""

    def write(self, number: str) -> None:
        self._file.write_text(f"{number}\n")
