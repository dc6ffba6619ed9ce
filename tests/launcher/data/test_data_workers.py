import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from flowrun.engine.errors import RunError
from flowrun.launcher.data.data_workers import BatchReading, DataWorkers, _share
from flowrun.launcher.data.sampler import Sampler
from flowrun.launcher.job.forked import run_in_fork
from flowrun.launcher.job.segments import RankRows, ReadingOrder, Segment
from support.layouts.stepwise import Noisy
from support.layouts.stepwise import sampler as stepwise_sampler

ORDER = ReadingOrder(
    segments=(Segment(0, 3, True, False), Segment(3, 4, True, False)),
    training=RankRows(slice(0, 3), 2),
    evaluation=RankRows(slice(1, 2), 1),
    eval_steps=2,
)


class Numbers(Dataset[dict[str, Tensor]]):
    """An item is its number, and who made it; `bad` fails, at `deadly` the process ends."""

    def __init__(self, bad: int = -1, deadly: int = -1) -> None:
        self.bad, self.deadly = bad, deadly

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        worker = get_worker_info()
        if worker and index == self.bad:
            raise OSError("no such image")
        if worker and index == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"n": torch.tensor(index), "worker": torch.tensor(worker.id if worker else -1)}


def samplers(data: Dataset[dict[str, Tensor]]) -> tuple[Sampler, Sampler]:
    training = Sampler(data=data, seed=1, batch_size=6, micro_batches=2, held_out=12)
    return training, replace(training, evaluation=True)


def batches(
    pair: tuple[Sampler, Sampler], number: int = 2
) -> Iterator[tuple[BatchReading, Tensor]]:
    """What the readers of a rank get, and that no process is left."""
    workers = DataWorkers(pair, ORDER, number, 0, lambda error: os._exit(3))
    for reading in ORDER:
        source = workers.evaluation if reading.evaluation else workers.training
        yield reading, source(reading.step, reading.micro_batch, reading.rows)["n"]
    workers.close()
    assert multiprocessing.active_children() == []


@pytest.mark.processes
@pytest.mark.parametrize("number", [1, 3])
def test_batches_are_those_that_the_rank_would_make(number: int) -> None:
    pair = samplers(Numbers())
    found = run_in_fork(lambda: [(reading, n.tolist()) for reading, n in batches(pair, number)])
    assert [reading for reading, _ in found] == list(ORDER)
    for reading, n in found:
        at = (reading.step, reading.micro_batch, reading.rows)
        assert n == pair[reading.evaluation](*at)["n"].tolist()


@pytest.mark.processes
def test_batches_lie_in_shared_memory_and_are_made_in_turns() -> None:
    def make() -> list[tuple[bool, int]]:
        workers = DataWorkers(samplers(Numbers()), ORDER, 2, 0, lambda error: None)
        made = [workers.training(0, k, slice(0, 3))["worker"] for k in range(2)]
        workers.close()
        return [(value.is_shared(), int(value[0])) for value in made]

    assert run_in_fork(make) == [(True, 0), (True, 1)]


@pytest.mark.processes
def test_samples_made_in_steps_are_augmented_alike() -> None:
    plain = stepwise_sampler(Noisy())
    readings = [BatchReading(False, 1, micro_batch, slice(0, 2)) for micro_batch in range(2)]

    def make() -> list[Tensor]:
        workers = DataWorkers((plain, plain), readings, 2, 0, lambda error: None)
        made = [workers.training(1, k, slice(0, 2))["images"].clone() for k in range(2)]
        workers.close()
        return made

    for k, images in enumerate(run_in_fork(make)):
        assert torch.equal(images, plain(1, k, slice(0, 2))["images"])


@pytest.mark.processes
def test_a_sample_that_fails_is_named_with_the_users_line() -> None:
    pair = samplers(Numbers(bad=int(samplers(Numbers())[0](1, 0, slice(0, 3))["n"][2])))
    told = r"rank 0, a data worker\n(.*\n)*.*no such image\n.*item \d+ of the data set\n.*"
    told += r"test_data_workers.py:\d+ in __getitem__: raise OSError"
    with pytest.raises(RunError, match=told):
        run_in_fork(lambda: list(batches(pair)))


@pytest.mark.processes
def test_a_process_that_dies_is_named_at_once() -> None:
    pair = samplers(Numbers(deadly=int(samplers(Numbers())[0](1, 0, slice(0, 3))["n"][2])))

    def make() -> str:
        told: SimpleQueue[RunError] = SimpleQueue()
        workers = DataWorkers(pair, ORDER, 2, 7, told.put)

        def read() -> None:
            """The thread that waits for a batch may see it before the signal is taken up."""
            try:
                for reading in ORDER:
                    workers.take(reading)
            except RunError as error:
                told.put(error)

        Thread(target=read, daemon=True).start()
        return str(told.get(timeout=60))

    text = run_in_fork(make)
    assert "rank 7, a data worker" in text and "was killed by SIGKILL" in text


def test_what_else_a_storage_holds_is_not_copied() -> None:
    data = torch.arange(1000.0)
    shared = _share(data[3:5])
    assert shared.tolist() == [3.0, 4.0] and shared.is_shared() and not data.is_shared()
    assert shared.untyped_storage().nbytes() == 8
