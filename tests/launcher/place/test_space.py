import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrun.launcher.place.space import Branch, Candidate, Space, factors


def tree(**changed: Any) -> dict[str, Any]:
    """The keys that a space is made of."""
    return {
        "auto": {"ranks": None, "keep": changed.pop("keep", [])},
        "placement": {
            "axes": {"data": 2, "tensor": 1},
            "stages": 2,
            "chunks": 2,
            "in_flight": None,
        },
        "train": {"batch_size": 8, "micro_batches": 4},
        "zero": {"axis": None, "stage": 2},
        "recompute": {"modules": []},
        "view": "consistent",
        **changed,
    }


@given(st.integers(1, 60), st.integers(1, 3))
def test_factors_are_all_products(number: int, parts: int) -> None:
    found = list(factors(number, parts))
    assert all(math.prod(each) == number for each in found)
    assert len(found) == len(set(found))
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    if parts == 2:
        assert len(found) == len(divisors)


def test_every_branch_has_the_ranks_and_divides_its_rows() -> None:
    branches = list(Space.of(tree(), 4).branches())
    assert len(branches) == len(set(branches))
    grids = {branch.grid for branch in branches}
    assert len(grids) == 6  # 4 as data x tensor x stages
    for branch in branches:
        assert branch.num_ranks == 4
        assert 8 // branch.micro_batches % dict(branch.axes)["data"] == 0
    fewest_rows = [b.micro_batches for b in branches if dict(b.axes)["data"] == 4]
    assert fewest_rows == [1, 2]


def test_the_usual_axes_are_there_without_being_named() -> None:
    placement = {"axes": {}, "stages": 1, "in_flight": None}
    assert Space.of(tree(placement=placement), 4).axes == ("data", "tensor")
    own = {"axes": {"dp": 2, "expert": 2}, "stages": 1, "in_flight": None}
    assert Space.of(tree(placement=own), 4).axes == ("dp", "expert")


def test_the_mirrored_view_has_batch_axes_alone() -> None:
    placement = {"axes": {}, "stages": 1, "in_flight": None}
    space = Space.of(tree(placement=placement, view="mirrored"), 4)
    assert {branch.grid for branch in space.branches()} == {((("data", 4),), 1)}


@pytest.mark.parametrize(
    ("keep", "count"),
    [
        (["placement.axes"], 4),  # data 2, so stages 2; 1, 2 or 4 micro-batches of 8 rows … 8
        (["placement.stages"], None),
        (["train"], None),
    ],
)
def test_what_is_kept_stays(keep: list[str], count: int | None) -> None:
    branches = list(Space.of(tree(keep=keep), 4).branches())
    if "placement.axes" in keep:
        assert {branch.grid for branch in branches} == {((("data", 2), ("tensor", 1)), 2)}
    elif "placement.stages" in keep:
        assert {branch.stages for branch in branches} == {2}
    else:
        assert {branch.micro_batches for branch in branches} == {4}


def test_a_stage_has_one_chunk_but_where_the_recipe_keeps_more() -> None:
    assert Candidate(Branch((), 2, 4)).keys["placement"]["chunks"] == 1
    branches = list(Space.of(tree(keep=["placement.chunks"]), 4).branches())
    assert branches
    assert all(branch.stages > 1 for branch in branches)


def test_kept_zero_and_recompute_are_those_of_the_recipe() -> None:
    branch = Branch((("data", 2), ("tensor", 1)), 2, 4)
    free = Space.of(tree(), 4, ("blocks.*",))
    assert {leaf.zero for leaf in free.leaves(branch)} == {0, 1, 2, 3}
    assert all(not leaf.recompute for leaf in free.leaves(branch))
    assert [each.keep for each in free.smaller(Candidate(branch))] == [("matmul",), ()]
    kept = Space.of(
        tree(keep=["zero", "recompute"], recompute={"modules": ["a"]}), 4, ("blocks.*",)
    )
    assert {(leaf.zero, leaf.recompute) for leaf in kept.leaves(branch)} == {(2, ("a",))}
    assert not list(kept.smaller(Candidate(branch)))


def test_zero_needs_an_axis_and_schedules_need_stages() -> None:
    space = Space.of(tree(), 4)
    alone = list(space.leaves(Branch((("data", 1), ("tensor", 4)), 1, 4)))
    assert alone == [Candidate(Branch((("data", 1), ("tensor", 4)), 1, 4))]
    staged = space.leaves(Branch((("data", 1), ("tensor", 2)), 2, 4))
    assert [leaf.in_flight for leaf in staged] == ["auto", "1f1b", "gpipe"]
