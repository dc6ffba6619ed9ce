import pytest

from gpu.one_device import Training, judge, lacks

PLAIN, KILLED = Training("", ""), Training("", "", ends=(1, "killed"))


@pytest.mark.parametrize(
    ("training", "seen", "verdict"),
    [
        (PLAIN, (0, "", [2.0, 1.0]), "same, to 0.0e+00"),
        (PLAIN, (0, "", [2.0, 1.1]), "FAULT: other losses, to 1.0e-01"),
        (PLAIN, (0, "", [2.0, float("nan")]), "FAULT: other losses, to nan"),
        (PLAIN, (0, "", [2.0]), "FAULT: 1 losses, the CPU 2: ''"),
        (PLAIN, (1, "no", []), "FAULT: status 1: 'no'"),
        (KILLED, (1, "it was killed", []), "named"),
        (KILLED, (1, "it ended", []), "FAULT: status 1: 'it ended'"),
    ],
)
def test_a_run_is_judged(
    training: Training, seen: tuple[int, str, list[float]], verdict: str
) -> None:
    assert judge(training, seen, (0, "", [2.0, 1.0])) == verdict


def test_what_a_machine_lacks_is_named() -> None:
    assert not lacks(2, 2, (2, 28, 9)) and not lacks(4, 1, (2, 30, 0))
    assert "need NCCL 2.30, preloaded; here is 2.28.9" in lacks(2, 1, (2, 28, 9))
