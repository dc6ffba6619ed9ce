from math import inf, nan

import pytest

from flowrun.launcher.ranks.finite import MOST_SKIPPED, StepJudge
from flowrun.launcher.report.progress import list_steps
from flowrun.launcher.report.report import SkippedSteps

PROBLEMS = [  # train.on_nonfinite, loss, norm of the gradients, what is said
    ("stop", 1.0, 2.0, ""),
    ("stop", 1.0, nan, "its gradients are not finite, and its loss is 1.0."),
    ("stop", inf, inf, "its gradients are not finite, and its loss is inf."),
    ("stop", inf, 2.0, "its loss is inf, though its gradients are finite."),
    ("stop", nan, 2.0, "its loss is nan, though its gradients are finite."),
    ("stop", nan, 0.0, ""),  # no target
    ("rollback", 1.0, nan, "its gradients are not finite, and its loss is 1.0."),
    ("skip", nan, nan, ""),
    ("skip", inf, 2.0, ""),
    ("ignore", nan, nan, ""),
]


@pytest.mark.parametrize(("policy", "loss", "norm", "said"), PROBLEMS)
def test_a_step_is_judged_by_its_loss_and_the_norm_of_its_gradients(
    policy: str, loss: float, norm: float, said: str
) -> None:
    assert StepJudge(policy, True).problem({"loss": loss, "grad_norm": norm}) == said


def test_a_micro_batch_without_a_target_has_no_loss_and_the_others_have_gradients() -> None:
    assert not StepJudge("stop", False).problem({"loss": nan, "grad_norm": 2.0})


@pytest.mark.parametrize("scaled", [{}, {"loss_scale": 1.0}], ids=["skip", "loss scale"])
def test_updates_are_not_left_out_for_ever(scaled: dict[str, float]) -> None:
    judge = StepJudge("skip" if not scaled else "stop", True)
    bad, good = ({"loss": 1.0, "grad_norm": norm, **scaled} for norm in (nan, 1.0))
    said = [judge.problem(step) for step in (*[bad] * 9, good, *[bad] * MOST_SKIPPED)]
    assert not any(said[:-1])
    assert said[-1].startswith(f"{MOST_SKIPPED} updates in a row were left out")


def test_a_long_list_of_steps_is_cut() -> None:
    assert list_steps(range(3), 3) == "0, 1, 2"
    assert list_steps(range(30), 32) == "22, 23, 24, 25, 26, 27, 28, 29 and 24 before"


def test_of_many_skipped_steps_the_newest_are_kept_and_all_are_counted() -> None:
    skipped = SkippedSteps()
    skipped.add(range(5000))
    skipped.add([4999, 5000])
    skipped.cut(4990)
    assert (skipped.count, len(skipped.newest), skipped.newest[-1]) == (4990, 989, 4989)
