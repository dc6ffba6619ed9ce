"""Hardware: the numbers that turn work into seconds.

One profile serves the choice of signatures and of stage cuts, small all-reduces that run as
exchanges, the search and the rehearsal.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flowrun.engine.hardware.measured_ops import Factors
from flowrun.engine.hardware.network import Level, Link, axis_links, message_link, move_home
from flowrun.engine.ir.placement import Placement

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Products:
    """The speed of matrix products in one dtype.

    flops: peak speed in operations per second; a multiply-add counts as 2; 0: as in fp32.
    flop: operations of a product, at the points of a curve.
    share: share of `flops` that a product reaches at each point; between the points interpolated
        by the logarithm of flop, outside as at the nearest point.
    """

    flops: float = 0.0
    flop: tuple[float, ...] = ()
    share: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("flop", "share"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # lists, after Hydra

    def seconds(self, flop: float) -> float:
        return flop / (self.flops * self.share_at(flop)) if flop else 0.0

    def share_at(self, flop: float) -> float:
        return _between(self.flop, self.share, flop) if self.flop else 1.0


def _between(points: Sequence[float], shares: Sequence[float], x: float) -> float:
    """Interpolate by the logarithm of x; outside of the points as at the nearest."""
    at = bisect_left(points, x)
    if at in (0, len(points)):
        return shares[max(0, at - 1)]
    low, high = points[at - 1 : at + 1]
    along = math.log(x / low) / math.log(high / low)
    return shares[at - 1] + along * (shares[at] - shares[at - 1])


@dataclass(frozen=True, slots=True)
class AttentionSpeed:
    """The speed of fused attention with heads of one width.

    width: of a head.
    keys: that a query sees, in the mean of all queries: with a causal mask half the length.
    forward, backward: share of the peak of products of the same dtype that the kernels reach at
        each of `keys`; between them interpolated by the logarithm, outside as at the nearest.
    """

    width: int = 128
    keys: tuple[float, ...] = ()
    forward: tuple[float, ...] = ()
    backward: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("keys", "forward", "backward"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # lists, after Hydra


PRODUCT_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")  # keys of a profile

# Measured on one thread of a server's core; small products miss the caches.
_CORE = (2.7e7, 5e7, 1e8, 2e8, 4e8, 1e9), (0.77, 0.862, 0.926, 0.962, 0.98, 0.992)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A rank's device, and the links between ranks.

    All numbers are of one rank.  The defaults are those of conf/hardware/cpu.yaml for ranks that
    share no memory, except the shares of convolutions and batched products and `elements_per_s`.

    name: name of the profile.
    device: "cpu": the ranks of a host share its cores; else each rank has a device of its own.
    source: where the numbers come from.
    fp32, bf16, fp16, fp8: products of such numbers; fp8 of speed 0: as bf16.
    tf32, uses_tf32: products of fp32 numbers that run as tf32, and whether they do.
    backward_share, weight_grad_share: speed of such products, as a share of that of forward.
    convolution_share, batched_share, attention_share: as a share of that of products.  Where
        `attention` has a table, attention_share is a factor of it.
    attention: fused attention, a table for each width of a head; an op has that of the next width.
    masked_share: of `attention` where there is a mask other than the causal one.
    winograd: factor by which a 3 x 3 convolution of fp32 takes fewer multiplications than counted;
        2.25 by F(2 x 2, 3 x 3) of Lavin and Gray (arXiv 1509.09308), 1 where it is not used.
    bias_apart: a bias is added in a pass of its own, unless a compiler fuses it into what follows.
    writes_behind: a processor writes a tile of a product after its sums are done, and does not
        multiply while it writes.  Curves were measured on cubes: what other products write beyond
        a cube is added.
    tile: rows and columns of the tiles that products compute, each as a whole.  Products of fewer
        rows or columns have kernels with smaller tiles.
    elements_per_s: op target -> speed in elements of its first output, for ops that take longer
        than their bytes: exponentials, statistics, sorting.
    ops: op target -> shapes -> measured time divided by the time that all other keys foresee
        (engine/hardware/measured_ops.py).
    own_messages: outputs of collectives share memory with nothing else, unless the collective is
        one of a blocking axis.
    workspace: op target -> bytes that its kernel takes for itself, for each byte of its first
        output.
    memory_bytes_per_s: streaming reads plus writes.
    host_bytes_per_s: of copies between a device and its host, each way.
    memory_bytes: memory of one rank; 0: not limited.
    reserved_bytes: part of memory_bytes that driver and libraries keep.
    communicator_bytes: part that a group of ranks takes (engine/actors/communicators.py), besides
        that of all ranks.
    op_s: overhead of starting one op.
    act_s: overhead of one act of an actor.
    levels: what joins ranks, innermost first.
    crowded_share: speed of a rank that takes turns on a core, as a share of its share of the core.
    core: share of a core that a rank has while all ranks of its host compute; all other numbers
        are of such a share (`slow_down`).
    cores: cores of the host for each thread that computes; those beyond one make batches ready,
        which takes turns with compute where they are too few; inf: never.
    """

    name: str = CPU
    device: str = CPU
    source: str = ""
    fp32: Products = Products(1.0e11, *_CORE)
    tf32: Products = Products()
    bf16: Products = Products(2.2e11, *_CORE)
    fp16: Products = Products(9e8)
    fp8: Products = Products()
    uses_tf32: bool = False
    backward_share: float = 0.97
    weight_grad_share: float = 0.9
    convolution_share: float = 1.0
    batched_share: float = 1.0
    attention_share: float = 0.6
    attention: tuple[AttentionSpeed, ...] = ()
    masked_share: float = 1.0
    winograd: float = 1.0
    bias_apart: bool = False
    writes_behind: bool = False
    tile: int = 1
    elements_per_s: dict[str, float] = field(default_factory=dict, hash=False)
    ops: dict[str, dict[str, float]] = field(default_factory=dict, hash=False)
    own_messages: bool = False
    workspace: dict[str, float] = field(default_factory=dict, hash=False)
    memory_bytes_per_s: float = 2.5e10
    host_bytes_per_s: float = 2.5e10
    memory_bytes: float = 0  # people write 16e9
    reserved_bytes: float = 0
    communicator_bytes: float = 0
    crowded_share: float = 1.0
    op_s: float = 4e-6
    act_s: float = 80e-6
    levels: tuple[Level, ...] = (
        Level(0, 150e-6, 1.5e9, taken=1.0, exchange_bytes={2: 1 << 21, 4: 1 << 18}),
    )
    core: float = 1.0
    cores: float = math.inf

    def __post_init__(self) -> None:
        for name in ("levels", "attention"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # lists, after Hydra
        if not isinstance(self.ops, Factors):
            object.__setattr__(self, "ops", Factors(self.ops))

    @property
    def tensor_bytes(self) -> int:
        """The bytes that a rank's tensors may take; 0: not limited."""
        return max(1, int(self.memory_bytes - self.reserved_bytes)) if self.memory_bytes else 0

    def products(self, dtype: str) -> Products:
        """Return the speed of products of a dtype, by its short name: "bf16".  Dtypes that the
        profile does not know, and those of speed 0, count as "fp32".
        """
        fp32 = self.tf32 if self.uses_tf32 and self.tf32.flops else self.fp32
        fp8 = self.fp8 if self.fp8.flops else self.bf16
        narrow = {"bf16": self.bf16, "fp16": self.fp16, "fp8": fp8}.get(dtype, fp32)
        return narrow if narrow.flops else fp32

    def attention_speed(self, width: int, keys: float, backward: bool) -> float:
        """Return the share of the peak of products that attention reaches by `attention`.

        width: of a head.  keys: that a query sees, in the mean.
        """
        table = min(self.attention, key=lambda each: abs(math.log(each.width / width)))
        return _between(table.keys, table.backward if backward else table.forward, keys)

    def slow_down(self, share: float) -> Hardware:
        """Return the hardware of a rank that has only a `share` of its core, which serves the
        levels in shared memory, too.
        """
        core, share = share, share * (self.crowded_share if share < 1 else 1.0)
        levels = tuple(level.slow_down(core) for level in self.levels)
        slowed = self.scale(products=share, memory=share, elements=share, starts=share)
        return replace(slowed, levels=levels, core=self.core * core)

    def scale(self, products: float, memory: float, elements: float, starts: float) -> Hardware:
        """Return the hardware of a core whose speeds are these parts of this one's."""
        each = {name: getattr(self, name) for name in PRODUCT_DTYPES}
        return replace(
            self,
            **{name: replace(one, flops=one.flops * products) for name, one in each.items()},
            elements_per_s={op: speed * elements for op, speed in self.elements_per_s.items()},
            memory_bytes_per_s=self.memory_bytes_per_s * memory,
            op_s=self.op_s / starts,
            act_s=self.act_s / starts,
        )

    def links(self, placement: Placement) -> tuple[Link, ...]:
        """Return the link of the groups along each axis of a placement."""
        return axis_links(self.levels, *move_home(self.levels, placement))

    def crossing(self, source: Placement, target: Placement) -> Link:
        """Return the link of messages from one placement to another."""
        return message_link(self.levels, *move_home(self.levels, source, target))

    def is_far(self, source: Placement, target: Placement) -> bool:
        """Return whether messages between two placements are slower than some inside the target."""
        between = self.crossing(source, target).bytes_per_s
        return any(k.bytes_per_s > between for k in self.links(target) if k.level >= 0)


def on_hosts(levels: Sequence[Level], ranks: int, shared: bool) -> tuple[Level, ...]:
    """Return the levels of a network whose hosts have `ranks` ranks each.

    shared: ranks of a host exchange messages in its memory; else they use the next level outside.
    """
    kept = (level for level in levels if shared or not level.shared_memory)
    return tuple(replace(level, ranks=ranks) if level.shared_memory else level for level in kept)
