import re
from pathlib import Path

import pytest

from flowrun.launcher.job.job import Job
from flowrun.launcher.place.place import Placed, place
from flowrun.launcher.place.saved import save
from flowrun.launcher.place.show_placements import ten, why
from flowrun.launcher.recipe.compose import load
from support.plans.placements import SMALL
from support.runs.workplace import End

LIMITED = [
    *SMALL,
    "auto.keep=[placement.in_flight, train.micro_batches]",
    "hardware.memory_bytes=9000000",
]


@pytest.fixture(scope="module")
def placed() -> Placed:
    """Under a limit that is met by recomputation alone."""
    return place(load(LIMITED))


def test_a_limit_is_met_and_the_table_says_why_others_lost(placed: Placed) -> None:
    assert placed.best.bytes <= 9_000_000
    rows = ten(placed.found)
    assert rows[0] is placed.best and 2 <= len(rows) <= 10
    reasons = [why(row, placed.best) for row in rows]
    assert reasons[0] == "the best"
    slower = re.compile(r"\d+\.\d% slower: (work|bytes|bubble|recomputation) \+\d")
    lacks = re.compile(r"rank \d+ \(stage \d\) lacks \d")
    assert any(lacks.match(reason) for reason in reasons)
    for reason in reasons[1:]:
        assert slower.match(reason) or lacks.match(reason) or reason == "as fast, no simpler"


def test_the_saved_recipe_is_the_one_that_won(placed: Placed, tmp_path: Path) -> None:
    file = tmp_path / "placed.yaml"
    save(placed, LIMITED, file)
    again = load([f"recipe={file}"])
    assert again == placed.recipe
    assert not again.auto.placement
    training = Job(again).training
    assert training.rehearsal.step_s == placed.best.step_s
    assert max(training.rehearsal.bound_bytes) == placed.best.bytes
    assert len(file.read_text().splitlines()) < 40


def test_a_limit_that_nothing_can_meet_names_the_closest_and_what_lacks(end: End) -> None:
    limit = "hardware.memory_bytes=100000"
    status, _, said = end("plan", *SMALL, limit, "auto.keep=[placement, train.micro_batches]")
    assert status == 2 and said.startswith("command line  hardware.memory_bytes = 100000")
    assert re.search(r"Closest is tensor 2, .*: rank \d \(stage \d\) needs [\d,]+ bytes", said)
    assert "are missing" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*SMALL, "auto.keep=[model]"], "is not one of its values"),
        ([*SMALL, "auto.ranks=0"], "at least 1, not 0"),
        ([*SMALL, "auto.plans=0"], "at least 1, not 0"),
        ([*SMALL, "auto.seconds=0"], "is over 0, not 0"),
        (["recipe=gpt_tp", "--save-recipe", "out.yaml"], "auto.placement=true"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[-1],
)
def test_what_cannot_be_searched_is_refused(end: End, words: list[str], said: str) -> None:
    status, _, err = end("plan", *words)
    assert status == 2 and said in err


@pytest.mark.parametrize(
    "given",
    [["recipe=gpt_tp", "parallel=auto"], ["recipe=gpt_sequence_parallel", "optim=sgd"]],
    ids=["a group that is no section", "a recipe that builds on one with that group"],
)
def test_groups_of_the_command_line_are_saved(given: list[str], tmp_path: Path) -> None:
    """ZeRO is tried too on layouts that were searched for."""
    arguments = [*given, *SMALL[1:], "auto.plans=8", "auto.keep=[train.micro_batches]"]
    found = place(load(arguments))
    save(found, arguments, tmp_path / "placed.yaml")
    assert load([f"recipe={tmp_path / 'placed.yaml'}"]) == found.recipe


SIDE_BY_SIDE = """
import torch
from torch import nn

class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 4) for _ in range(14))
        self.head = nn.Linear(14 * 4 + 8, 4)

    def forward(self, ids, numbers):
        rows = [table(ids[:, k]) for k, table in enumerate(self.tables)]
        return self.head(torch.cat([*rows, numbers], 1))
"""
TABLES = """
defaults: [/optim: sgd, /launch: virtual]
model: {_target_: side_by_side.Tables}
data: {_target_: flowrun.launcher.data.clicks.Clicks, samples: 64, ids: 50, fields: 14, numbers: 8}
task:
  inputs: {ids: ids, numbers: numbers}
  loss: {_target_: side_by_side_loss.loss}
placement: {axes: {data: 2}}
eval: {batches: 0}
train: {batch_size: 4}
auto: {placement: true, plans: 3}
"""


@pytest.mark.thorough
def test_equal_modules_that_lie_side_by_side_are_no_blocks(tmp_path: Path) -> None:
    (tmp_path / "side_by_side.py").write_text(SIDE_BY_SIDE)
    (tmp_path / "side_by_side_loss.py").write_text(
        "def loss(output, batch):\n    return (output.sum(1) - batch['clicks']).square().mean()\n"
    )
    (tmp_path / "tables.yaml").write_text(TABLES)
    assert place(load([f"recipe={tmp_path / 'tables.yaml'}"])).best.step_s > 0
