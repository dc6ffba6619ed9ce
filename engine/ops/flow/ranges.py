"""`flow.check_range(ids, size, ignored, wraps, what, fields) -> ids`, if all of them are in range.

Torch's kernels look up labels and ids of whole tables and raise for one that is not there.  The
programs of split tables, and the written cross entropy, look up by a mask and would take such a one
for another rank's.  So what is looked up is checked before (rewrites/check_ranges.py).

    size         classes, or rows of the table
    ignored      a label that counts for nothing (ignore_index); None: there is none
    wraps        negative ones count from the end
    what         a pair of words: what they are, and what they are out of
    fields       of the batch, from which they come
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowrun.engine.ir.op_info import OpInfo, Trait
from flowrun.engine.ops.math.pointwise import NONLINEAR
from flowrun.engine.torch_internals import assert_async

CHECK = "flow.check_range"


class OutOfRange(IndexError):
    """An id that its table does not have."""

    def __init__(self, value: int, size: int, what: tuple[str, str], fields: tuple[str, ...]):
        super().__init__(value, size, what, fields)
        self.value, self.size, self.what, self.fields = value, size, what, fields

    def __str__(self) -> str:
        return self.describe(self.fields)

    def describe(self, fields: tuple[str, ...]) -> str:
        """Say which id is wrong and how many there are; fields: of the batch, that may have it."""
        thing, of = self.what
        field = f" (field {' or '.join(fields)})" if fields else ""
        return f"{thing} {self.value} is out of range for {self.size} {of}{field}"


def outside(ids: torch.Tensor, size: int, ignored: int | None, wraps: bool = False) -> torch.Tensor:
    """Return a mask of the ids that are not in a table of `size` rows.

    ignored: an id that counts for nothing; None: there is none.  wraps: negative ids count from the
        end.
    """
    is_outside = (ids < (-size if wraps else 0)) | (ids >= size)
    return is_outside if ignored is None else is_outside & (ids != ignored)


def check_range(
    ids: torch.Tensor,
    size: int,
    ignored: int | None,
    wraps: bool,
    what: tuple[str, str],
    fields: tuple[str, ...],
) -> torch.Tensor:
    """Return the ids if all are in range.

    size, ignored, wraps, what, fields: see the module.
    Raises OutOfRange; on a device that computes asynchronously, that device asserts.
    """
    if not ids.numel() or type(ids) is not torch.Tensor:  # of a tensor without memory: the shape
        return ids
    if not ids.is_cpu:
        fine = ~outside(ids, size, ignored, wraps).any()
        assert_async(fine, f"{what[0]} out of range for {size} {what[1]}: {fields}")
        return ids
    low, high = torch.aminmax(ids)
    if low < (-size if wraps else 0) or high >= size:
        bad = ids[outside(ids, size, ignored, wraps)]
        if bad.numel():
            raise OutOfRange(int(bad[0]), size, what, fields)
    return ids


OPS: Mapping[str, OpInfo] = {
    CHECK: OpInfo(NONLINEAR, function=check_range, traits=(Trait.VIEW, Trait.PLAIN))
}
