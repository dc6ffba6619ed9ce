"""Live: the bytes of one rank of a stage while a plan is rehearsed, act by act.

When each act runs is foreseen, and with it how many micro-batches wait for backward at once.  A run
may have fewer or more, as messages come: up to the slots of the stash registers, which is what
`bound` counts.
"""

from __future__ import annotations

from flowrun.engine.cost.footprint import Act, Footprint
from flowrun.engine.cost.messages import Messages
from flowrun.engine.plan import Actor, Plan, RegionWork


class Live:
    """Bytes of one rank while a plan is rehearsed.

    peak: most at once, and all that messages ever touched of shared memory: its pages stay.  bound:
    the same, if beside the micro-batch that an act works on as many others wait for backward as
    stash registers have slots for.
    """

    def __init__(self, plan: Plan, stage: int) -> None:
        self.plan = plan
        self.footprint = Footprint(plan, stage)
        self.live = sum(self.footprint.kind_bytes.values())
        self.slots = self._stash_slots(stage)
        self.stashed: dict[int, int] = {}  # micro-batch -> bytes that wait for its backward
        size = self.footprint.storage_bytes
        self.others = sum((slots - 1) * size(s) for s, slots in self.slots.items())
        self.under_way: dict[int, int] = {}
        self.waiting = self.held = 0  # sums of stashed and under_way
        self.messages = Messages()
        of_step = (r for r in plan.registers if r.stage == stage and r.per_step)
        self.of_step = {storage for r in of_step for storage in self.footprint.slot(r)}
        self._peak = self._bound = self.live
        self.readers_left: dict[tuple[int, int], int] = {}
        self.holders: dict[tuple[str, int], int] = {}  # storage, version -> register versions
        # (actor, fills) -> registers that are no variable's, and the acts that a version lasts
        self._changing: dict[tuple[int, bool], list[tuple[int, int]]] = {}

    @property
    def peak(self) -> int:
        """Most bytes."""
        return self._peak + self.messages.touched

    @property
    def bound(self) -> int:
        """Most bytes with every stash full."""
        return self._bound + self.messages.touched

    def moment(self) -> tuple[object, ...]:
        """All that decides what follows, but for versions."""
        return self.live, self.messages.moment()

    def begin(self, actor: int, act: int) -> None:
        """An act starts."""
        described = self.plan.actors[actor]
        found = self._act(described, act)
        self._reach(described, act, found.begin)
        self.under_way[actor] = found.held
        self.held += found.held
        self.messages.begin(actor, found.written)

    def end(self, actor: int, act: int) -> None:
        """An act ends: what it made is live, what it was the last to read is free."""
        described = self.plan.actors[actor]
        self.held -= self.under_way.pop(actor)
        self.messages.end(actor)
        if isinstance(described.work, RegionWork):
            self.messages.computed()
        self._reach(described, act, self._act(described, act).end)
        for r, version in self._versions(described, described.outputs, act, filled=True):
            self.readers_left[r, version] = len(self.plan.registers[r].readers)
            for storage in self.footprint.slot(self.plan.registers[r]):
                held = self.holders.get((storage, version), 0)
                self.holders[storage, version] = held + 1
                if not held:
                    self._add(storage, version, 1)
        for r, version in self._versions(described, described.inputs, act, filled=False):
            if (r, version) in self.readers_left:
                self.readers_left[r, version] -= 1
                if not self.readers_left[r, version]:
                    del self.readers_left[r, version]
                    self._drop(r, version)

    def forward(self, acts: int) -> None:
        """As if so many micro-batches more had come and gone."""
        rates = {r.id: 0 if r.per_step else acts for r in self.plan.registers}
        self.readers_left = {(r, v + rates[r]): n for (r, v), n in self.readers_left.items()}
        self.holders = {
            (storage, v if storage in self.of_step else v + acts): n
            for (storage, v), n in self.holders.items()
        }
        self.stashed = {version + acts: n for version, n in self.stashed.items()}

    def _stash_slots(self, stage: int) -> dict[str, int]:
        """Storage that waits for backward -> the most versions of it."""
        slots: dict[str, int] = {}
        for r in (r for r in self.plan.registers if r.stash and r.stage == stage):
            for storage in self.footprint.slot(r):
                slots[storage] = max(r.slots, slots.get(storage, 0))
        return slots

    def _reach(self, actor: Actor, act: int, more: int) -> None:
        """So many bytes more than what is live."""
        now = self.live + self.held + more
        self._peak = max(self._peak, now)
        if not actor.per_step:
            waiting = self.waiting - self.stashed.get(act, 0)
            now += max(0, self.others - waiting)
        self._bound = max(self._bound, now)

    def _add(self, storage: str, version: int, count: int) -> None:
        num_bytes = count * self.footprint.storage_bytes(storage)
        self.live += num_bytes
        if storage in self.slots:
            self.waiting += num_bytes
            self.stashed[version] = self.stashed.get(version, 0) + num_bytes
            if not self.stashed[version]:
                del self.stashed[version]

    def _drop(self, register: int, version: int) -> None:
        for storage in self.footprint.slot(self.plan.registers[register]):
            self.holders[storage, version] -= 1
            if not self.holders[storage, version]:
                del self.holders[storage, version]
                self._add(storage, version, -1)

    def _act(self, actor: Actor, act: int) -> Act:
        first = act % self.plan.acts_per_step(actor) == 0
        return self.footprint.act(actor, self._freed(actor, act), first)

    def _versions(
        self, actor: Actor, registers: tuple[int, ...], act: int, *, filled: bool
    ) -> list[tuple[int, int]]:
        """Versions that an act begins to fill, or is the last act to read."""
        key = (actor.id, filled)
        if key not in self._changing:
            acts, known = self.plan.acts_per_step(actor), self.plan.registers
            changing = ((r, acts if known[r].per_step else 1) for r in registers)
            self._changing[key] = [(r, every) for r, every in changing if not known[r].initial]
        at = act if filled else act + 1
        return [(r, act // every) for r, every in self._changing[key] if at % every == 0]

    def _freed(self, actor: Actor, act: int) -> frozenset[str]:
        """Storages that nobody holds once this act has returned its inputs."""
        returned: dict[tuple[str, int], int] = {}
        for r, version in self._versions(actor, actor.inputs, act, filled=False):
            if self.readers_left.get((r, version)) == 1:
                for storage in self.footprint.slot(self.plan.registers[r]):
                    returned[storage, version] = returned.get((storage, version), 0) + 1
        return frozenset(s for (s, v), n in returned.items() if n == self.holders.get((s, v)))
