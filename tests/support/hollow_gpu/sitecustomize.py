"""Python imports this first, in every process that run.py starts: workers of flowrun, and tests,
compute on the hollow GPU.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from typing import Any

_WORKER, _PEER = "flowrun.launcher.ranks.worker", "flowrun.launcher.bench.peers.peer_rank"


class _Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name not in (_WORKER, _PEER):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _without_cudnn()
            if name == _WORKER:
                _computing(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _without_cudnn() -> None:
    """It asks a real device."""
    import torch

    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)


def _computing(worker: Any) -> None:
    import ops

    plain = worker.RankProcess.run

    def run(self: Any, *given: Any) -> None:
        ops.in_other_threads()
        with ops.Computed():
            plain(self, *given)

    worker.RankProcess.run = run


sys.meta_path.insert(0, _Hook())
