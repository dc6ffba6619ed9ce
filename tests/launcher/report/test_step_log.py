import statistics

from flowrun.launcher.report.report import StepLog, StepRecord


def log_of(seconds: list[float]) -> StepLog:
    log = StepLog()
    for step, step_s in enumerate(seconds):
        log.add(StepRecord(step=step, loss=float(step), step_s=step_s, speed=0.0))
    return log


def test_the_first_tenth_of_the_steps_does_not_count() -> None:
    assert log_of([9.0, *[1.0] * 9]).settled_s() == 1.0
    assert log_of([3.0, 5.0]).settled_s() == 4.0
    assert StepLog().settled_s() == 0.0


def test_a_run_of_many_steps_keeps_the_newest() -> None:
    log = log_of([float(k) for k in range(30_000)])
    assert log.first and log.last
    assert (log.count, log.first.step, log.last.step) == (30_000, 0, 29_999)
    assert len(log.newest) < 20_000
    assert log.settled_s() == statistics.median(record.step_s for record in log.newest)


def test_steps_that_are_done_again_are_forgotten() -> None:
    log = log_of([1.0] * 8)
    log.cut(5)
    assert log.last and (log.count, log.last.step) == (5, 4)
    log.cut(9)
    assert log.count == 5
    log.cut(0)
    assert (log.count, log.first, log.last) == (0, None, None)
