import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flowrun.engine.boxing.boxing import BoxingStep
from flowrun.engine.ir.sbp import B, P
from flowrun.engine.runtime.transport.inbox import Inbox
from flowrun.engine.runtime.transport.links import Links
from flowrun.engine.runtime.transport.pending import Collective, PeerGone
from flowrun.engine.runtime.transport.shared_memory import SharedMemoryTransport
from flowrun.engine.runtime.transport.transport import BucketLayout, GroupLayout
from support.layouts.gloo import start_ranks

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
RANKS = 4
ALL, PAIR, ACROSS = (0, 1, 2, 3), (0, 1), (1, 2)


def _meet(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=RANKS
    )


def _rank(rank: int, folder: str) -> None:
    """Ranks 0 and 1 are on one host, 2 and 3 on another; then rank 3 ends without a word."""
    torch.set_num_threads(1)
    _meet(rank, folder)
    peers = SharedMemoryTransport(rank, Inbox(), f"host {rank // 2}", used=True)
    said: dict[str, Any] = {
        "beside": [k for k in range(RANKS) if k != rank and peers.reaches((rank, k))],
        "together": [peers.reaches(ranks) for ranks in (ALL, PAIR, ACROSS)],
    }
    peers.close()
    links = Links(rank, CPU)
    links.join_groups([ALL])
    layouts = BucketLayout((GroupLayout((5,), RANKS, P, B),))
    member = Collective(BoxingStep(0, P, B), layouts, ALL, rank)
    many = [links.start(member, [torch.full((5,), 1.0)]) for _ in range(1000)]
    last = [pending.wait() for pending in many][-1]
    said["sum"] = last[0].tolist()
    links.rest(range(RANKS))  # sockets are still full of the thousand; the barrier hears of none
    dist.barrier()
    if rank == 3:
        links.send([torch.tensor([3.0])], 0, 7)
        os._exit(0)
    late = links.start(member, [torch.ones(5)])
    with pytest.raises(PeerGone, match="rank 3 has ended"):
        late.wait()
    if rank == 0:
        said["message"] = links.receive([(1,)], [torch.float32], 3, 7).wait()[0].tolist()
        with pytest.raises(PeerGone, match="rank 3 has ended"):
            links.receive([(1,)], [torch.float32], 3, 7).wait()
        with pytest.raises(PeerGone, match="rank 3 has ended"):
            links.send([torch.ones(3)], 3, 8).wait()
    Path(folder, f"{rank}.json").write_text(json.dumps(said))
    os._exit(0)  # a regular end would wait for rank 3


def _named_memory() -> set[str]:
    """Shared memory of this machine, but for the semaphores of other tests' processes."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    before = _named_memory()
    start_ranks(_rank, RANKS, str(folder))
    assert _named_memory() <= before, "memory was left behind"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS - 1)]


def test_ranks_that_name_one_host_share_memory(told: list[dict[str, Any]]) -> None:
    assert [said["beside"] for said in told] == [[1], [0], [3]]


def test_all_ranks_know_which_groups_are_on_one_host(told: list[dict[str, Any]]) -> None:
    assert [said["together"] for said in told] == [[False, True, False]] * 3


def test_more_messages_can_be_under_way_than_a_socket_has_room_for(
    told: list[dict[str, Any]],
) -> None:
    assert [said["sum"] for said in told] == [[4.0] * 5] * 3


def test_what_a_rank_said_before_it_ended_is_still_heard(told: list[dict[str, Any]]) -> None:
    assert told[0]["message"] == [3.0]
