import io
import re
from collections import Counter
from functools import cache

import pytest
from rich.console import Console

from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.report.show_plan import _phases_shown, plan_report


@cache
def shown(width: int, *changes: str) -> str:
    out = io.StringIO()
    job = Job(load([*changes, "launch=virtual"]), values=False)
    Console(file=out, width=width).print(plan_report(job, width))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_value_of_a_plan_is_cut(width: int) -> None:
    text = shown(width, "recipe=mlp_hybrid")
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert width < 80 or ("35.9 kB" in text and "output.weight" in text)


def test_a_narrow_plan_leaves_out_what_follows_from_the_rest() -> None:
    wide, narrow = shown(100, "recipe=mlp_hybrid"), shown(80, "recipe=mlp_hybrid")
    assert "bytes each" in wide and "a rank holds" in wide and "backward" in wide
    assert "bytes each" not in narrow and "a rank holds" not in narrow
    assert "B      stage 0  all-to-all over data  S(0) -> S(1)      1    1.3 kB" in narrow


def test_without_boxings_there_is_no_table_of_them() -> None:
    text = shown(80, "recipe=mlp_hybrid", "placement.axes.data=1")
    assert "boxings: none, no bytes travel between ranks" in text and "a step\n" not in text


def test_a_plan_shows_which_block_holds_what_and_its_highest_moment() -> None:
    keys = ("recipe=gpt_dp", "model.depth=2", "recompute.modules=[blocks.1]")
    table = shown(100, *keys).partition("memory by block")[2]
    rows = re.findall(r"blocks.\d +0 +([\d.]+ .B) +([\d.]+) MB +backward", table)
    (stored, most), (again, _) = rows
    assert stored.endswith(" MB") and float(stored[:-3]) < float(most)
    assert again.endswith(" kB")  # what enters the block alone


def test_slots_of_many_micro_batches_show_each_phase_and_waiting_by_its_share() -> None:
    line = [*_phases_shown([{"forward": 0.2, "backward": 0.35}] * 100, 1.0)]
    found = Counter(line)
    assert all(abs(found[k] - n) <= 1 for k, n in {"forward": 20, "backward": 35, "": 45}.items())
    assert len({*line[:6]}) == 3  # and each of them from the beginning


def test_a_slot_of_one_phase_shows_it() -> None:
    slots: list[dict[str, float]] = [{"forward": 1.0}, {"forward": 0.4}, {}, {"backward": 1.0}]
    assert [*_phases_shown(slots, 1.0)] == ["forward", "", "", "backward"]
