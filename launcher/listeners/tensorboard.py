"""TensorBoard's events, in the run's folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from flowrun.launcher.listeners.listener import Curves, RunInfo


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
