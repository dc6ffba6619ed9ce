"""launch=virtual: all ranks of the plan in this process."""

from __future__ import annotations

import time

from flowrun.engine.errors import RunError
from flowrun.launcher.ranks import rank_events as said
from flowrun.launcher.ranks.failure import describe
from flowrun.launcher.ranks.finite import NotFinite
from flowrun.launcher.ranks.step_gate import StepGate
from flowrun.launcher.ranks.virtual_run import train
from flowrun.launcher.ranks.wire import Notice
from flowrun.launcher.supervise.hands.desk import Interrupted
from flowrun.launcher.supervise.hands.newest_state import place_of
from flowrun.launcher.supervise.hands.ranks_hand import RanksHand
from flowrun.launcher.supervise.hosts.endpoint import MeetingPlace
from flowrun.launcher.supervise.life.events import RanksForked, RanksGone

_FULL_S = 0.002  # from one look to the next whether fewer events wait


class VirtualRanks(RanksHand):
    """All ranks of the plan in this process: the main thread runs them."""

    _stops = False

    def fork(self, place: MeetingPlace) -> None:
        start = place_of(self.compiled.job.start)
        self._stops = False
        self.gate = StepGate.of_threads(self.compiled.training.plan.num_ranks, start.step)
        self.wires.post(RanksForked(start))
        self.wires.desk.begin("training", self._run, yields_to=2)

    def kill(self) -> None:
        """Let the main thread stop at the next step; a second signal interrupts it."""
        self._stops = True

    def _run(self) -> None:
        assert self.gate is not None
        try:
            train(self.compiled, self.wires.record.run_folder, self._send, self.gate)
        except RunError as error:
            if isinstance(error, NotFinite):
                self.wires.post(said.BadStep(error.steps))
            where, problem, _ = describe(error)
            self._post_failure(where, problem)
        except (_Stopped, Interrupted):
            pass
        except Exception as error:  # of a user's code
            self.exception = error
            self._post_failure("the virtual cluster", repr(error))
        finally:
            self.gate = None
            self.wires.post(RanksGone())

    def _post_failure(self, where: str, problem: str) -> None:
        self.wires.post(said.RankFailed(said.Reason(where, problem), lost_peer=False))

    def _send(self, event: Notice) -> None:
        self.wires.post(event)
        while self.wires.waits() and not self._stops:
            time.sleep(_FULL_S)
        if self._stops:
            raise _Stopped


class _Stopped(Exception):
    """The main thread is to train no further."""
