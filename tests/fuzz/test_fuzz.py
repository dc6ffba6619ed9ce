"""Mutated recipes are refused with a place, or composed."""

from pathlib import Path

import pytest

from fuzz import judge as judges
from fuzz.fuzz import (
    MOST_BYTES,
    compose_case,
    table,
    try_cases,
    try_damaged,
    warm_up,
    warm_up_files,
)
from fuzz.judge import COMPOSED, FAULTS, LOCATED, judge
from fuzz.mutations import FILE, Case, make_case

SEED, NUMBER = 0, 50  # of CI; more, and their plans: python tests/fuzz/fuzz.py

# What once fell through, with a part of what is said now.
KNOWN = {
    "a size that is a mapping": (("placement.axes={tensor: 1, data: {}}",), b"", "axes.data"),
    "no size of a batch": (("train.batch_size=2147483648",), b"", "train.batch_size"),
    "an axis without end": (("placement.axes.data=1000000000000",), b"", "at most 1,048,576"),
    "a key deleted by value": (("~train.steps={x: B}",), b"", "command line  ~train.steps"),
    "a group in a package": (("model@x=0",), b"", "command line  model@x=0"),
    "defaults that are a number": ((), b"defaults: 7\n", "defaults must be a list"),
    "bytes that are no text": ((), b"train:\n  steps: \xff\n", "recipe = mutated.yaml"),
    "a control character": ((), b"train: \x07\n", "mutated.yaml"),
    "no placement among all sections": (
        (),
        b"{model: {}, data: {}, optim: {}, launch: {}, hardware: {}}",
        "model._target_",
    ),
    "pins that stand for nothing": (("sbp=${no.such}",), b"", "'no.such' not found"),
    "axes that stand for a number": (("placement.axes=${train.steps}",), b"", "mapping of keys"),
    "a section that stands for another": (("train=${sbp}",), b"", "keys batch_size"),
    "a list that stands for a number": (("recompute.modules=${train.steps}",), b"", "a list"),
    "a choice that stands for nothing": (("model=${no.such}",), b"", "line  model=${no.such}"),
    "a word without end": (("optim=" + "x" * 5000,), b"", "x…"),
    "a name without end": (("recipe=" + "x" * 300,), b"", "too long for a name"),
    "keys in keys": ((), b"train: " + b"{a: " * 150 + b"1" + b"}" * 150, "nested too deeply"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_once_fell_through_is_located(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words, file, said = KNOWN[name]
    recipe = f"recipe={FILE if file else 'mlp_hybrid'}"
    verdict = compose_case(Case(0, "words", (recipe, *words), file))
    assert verdict.outcome == LOCATED, verdict.text
    assert said in verdict.text


@pytest.mark.processes
def test_mutated_recipes_are_planned_or_refused_with_a_place() -> None:
    warm_up()
    verdicts = list(try_cases(range(SEED, SEED + NUMBER), 0))
    assert [str(verdict) for verdict in verdicts if verdict.outcome in FAULTS] == []
    assert {verdict.outcome for verdict in verdicts} == {COMPOSED, LOCATED}, table(verdicts)


def test_a_case_is_a_function_of_its_seed() -> None:
    assert [make_case(seed) for seed in range(20)] == [make_case(seed) for seed in range(20)]
    assert len({make_case(seed) for seed in range(20)}) == 20


SAID = {
    judges.PLANNED: (0, ""),
    LOCATED: (2, "command line  train.steps = x\n  Write an integer."),
    judges.UNLOCATED: (2, "recipe\n  something is wrong."),
    judges.EXCEPTION: (2, "recipe\n  ValueError: 7"),
    judges.TRACEBACK: (1, "Traceback (most recent call last):\n"),
    judges.BUG: (2, "a bug in flowrun (rank.py:3 in run)\n  KeyError: 3"),
    judges.HANG: (-24, ""),
    judges.MEMORY: (1, "MemoryError"),
    judges.CRASH: (-11, ""),
    judges.LONG: (2, "command line  x" * 1000),
}


@pytest.mark.parametrize("outcome", SAID)
def test_the_judge_names_each_outcome(outcome: str) -> None:
    assert judge(*SAID[outcome], peak_bytes=0, most_bytes=MOST_BYTES) == outcome


@pytest.mark.thorough
@pytest.mark.processes
def test_damaged_files_are_read_or_refused_with_a_place() -> None:
    warm_up_files()
    verdicts = list(try_damaged(range(60)))
    assert [str(verdict) for verdict in verdicts if verdict.outcome in FAULTS] == []
