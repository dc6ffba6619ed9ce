"""Ranks in the layout of a run give the logits that one process does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from flowrun.engine.errors import RecipeError, RunError
from flowrun.launcher.commands.sample import go_on, open_in_layout, open_source
from flowrun.launcher.sampling.ranks import RanksModel
from flowrun.launcher.text.codec import Codec
from flowrun.launcher.text.generate import Drawing
from support.runs.saved_run import TINY, save_run

PROMPT, GREEDY = "def ", Drawing(tokens=6, temperature=0)


@contextmanager
def in_layout(folder: Path) -> Iterator[tuple[RanksModel, Codec]]:
    """Ranks that read 12 tokens at most."""
    threads = torch.get_num_threads()
    try:
        with open_in_layout(folder, lambda codec: 12) as opened:
            yield opened
    finally:
        torch.set_num_threads(threads)


@pytest.mark.processes
@pytest.mark.parametrize(
    "layout",
    [
        ("recipe=gpt_tp",),
        ("recipe=gpt_pp", "placement.stages=2"),
        ("recipe=gpt_zero", "zero.stage=3", "zero.min_size=1"),
    ],
    ids=["tensor 2", "stages 2", "ZeRO 3"],
)
def test_ranks_write_what_one_process_writes(workplace: Path, layout: tuple[str, ...]) -> None:
    folder = save_run(workplace / "run", *TINY[1:], "data.length=10", "model.depth=2", *layout)
    alone, codec = open_source(folder)
    with in_layout(folder) as (ranks, same):
        assert (ranks.window, len(ranks.pipes)) == (10, 2)
        for text in (PROMPT, "a longer text than the window has"):
            ids = codec.encode(text)
            torch.testing.assert_close(ranks.next_logits(ids), alone.next_logits(ids))
        text = "".join(go_on(ranks, same, PROMPT, GREEDY))
    assert text == "".join(go_on(alone, codec, PROMPT, GREEDY))


@pytest.mark.processes
def test_a_rank_that_is_killed_is_named(workplace: Path) -> None:
    folder = save_run(workplace / "run", *TINY[1:], "recipe=gpt_tp")
    with in_layout(folder) as (ranks, codec):
        os.kill(ranks.processes.pids()[1], signal.SIGKILL)
        with pytest.raises(RunError, match="the process was killed by SIGKILL"):
            ranks.next_logits(codec.encode(PROMPT))


def test_a_folder_without_a_recipe_says_no_layout(workplace: Path) -> None:
    with (
        pytest.raises(RecipeError, match="no recipe"),
        in_layout(workplace),
    ):
        pass
