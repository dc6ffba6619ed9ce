"""Calls at the edge of a chunk of the interpreter's stack."""

from __future__ import annotations

import resource

from flowrun.engine.runtime.process.call_stack import in_one_chunk

CALLS, DEPTH = 500, 400


def faults_at(depth: int) -> int:
    """How many pages the system maps while a loop calls, `depth` calls below this one."""
    if depth:
        return faults_at(depth - 1)

    def nothing() -> None:
        return None

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        nothing()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def most_faults() -> int:
    return max(faults_at(depth) for depth in range(DEPTH))


def test_a_loop_at_an_edge_of_the_stack_maps_a_page_in_every_turn() -> None:
    """What call_stack.py relies on: where this fails, the interpreter has mended it."""
    assert most_faults() >= CALLS


def test_in_one_chunk_no_loop_lies_at_an_edge() -> None:
    assert in_one_chunk(most_faults)() < CALLS / 10
