"""alike_blocks: blocks of a model that torch need not trace, as it traces others like them.

Invariant: the captured graph is that of a trace of all blocks, node by node, as it prints.  A
block's code sees the block by its state and by what it is called with.  So where states are alike
down to the last attribute (is_alike), a call of a block that is left out is one node, with all that
it is called with; fold.py accepts it only if it is called as the blocks before it are.  The code
around the blocks is traced as it is.  Where anything differs, where forward changes anything in
Python, or where torch refuses such a node, all blocks are traced.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flowrun.engine.capture.patches.substitutes import replace_attribute

MIN_BLOCKS = 10  # equal blocks for which folding pays
KEPT_BLOCKS = 4  # two that autograd must treat alike, and one on either side
# Traced before those that are left out: the first, which no block comes before, those that fold.py
# keeps, and one more; after them the last, which no block comes after.
_BEFORE = KEPT_BLOCKS + 2


class AbsentBlocks(NamedTuple):
    """Blocks of one list that are left out; the block before them is like them.

    blocks: dotted path of the list.  absent: numbers of the blocks.
    """

    blocks: str
    absent: range


def find_runs(model: nn.Module) -> tuple[AbsentBlocks, ...]:
    """Return what may be left out of the lists of a model, of lists within blocks nothing."""
    uses = Counter(id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False))
    runs: list[AbsentBlocks] = []
    for path, part in model.named_modules():
        inside = any(f"{path}.".startswith(f"{run.blocks}.") for run in runs)
        if not path or inside or type(part) not in (nn.ModuleList, nn.Sequential):
            continue
        first, blocks = 0, list(part)
        for k, block in enumerate(blocks):
            if not (k and is_alike(blocks[k - 1], block)):
                first = k
            if not _is_plain(block, uses):
                first = k + 1
        if len(blocks) - first >= MIN_BLOCKS + 2:
            runs.append(AbsentBlocks(path, range(first + _BEFORE, len(blocks) - 1)))
    return tuple(runs)


def _is_plain(block: nn.Module | None, uses: Mapping[int, int]) -> bool:
    """Return whether a block shares no parameter and has no buffer, and its forward is its class's.

    uses: id of a parameter -> the number of its names.
    """
    if block is None:  # a list may have holes
        return False
    shared = any(uses[id(parameter)] > 1 for parameter in block.parameters())
    own = "forward" in vars(type(block)) and "forward" not in vars(block)
    return own and not shared and next(block.buffers(), None) is None


# What equal values of compute alike; functions and types are alike only if they are the same.
_VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device)
_CODE = (types.FunctionType, types.BuiltinFunctionType, type)


def is_alike(one: object, other: object) -> bool:
    """Return whether two blocks, or two parts of their states, make code compute alike."""
    if type(one) is not type(other):
        return False
    these, those = _parts(one), _parts(other)
    if these is not None and those is not None:
        return len(these) == len(those) and all(map(is_alike, these, those))
    if isinstance(one, _VALUES):
        return repr(one) == repr(other)
    return isinstance(one, _CODE) and one is other


def _parts(value: object) -> Sequence[object] | None:
    """Return all that code may know of a state: of a parameter not its numbers."""
    if isinstance(value, Tensor):
        form = value.shape, value.stride(), value.dtype, value.device, value.requires_grad
        return (*form, vars(value))
    if isinstance(value, nn.Module | dict):
        return [*(value if isinstance(value, dict) else vars(value)).items()]
    if isinstance(value, list | tuple) or (isinstance(value, set) and not value):
        return list(value)
    return None


def call_block(x: Tensor, /, *_: object, **__: object) -> Tensor:
    """Mark the call of a block with all that it is called with."""
    return x.clone()


@contextmanager
def leave_out(model: nn.Module, runs: Sequence[AbsentBlocks]) -> Iterator[None]:
    """Within, each call of a block of a run is marked in torch's graph; of those that are left out
    the mark is all.
    """
    with ExitStack() as stack:
        kinds: dict[type[nn.Module], None] = {}
        for run in runs:
            blocks = list(model.get_submodule(run.blocks))  # type: ignore[call-overload]
            for number in range(run.absent.start - _BEFORE, run.absent.stop + 1):
                vars(blocks[number])[_ABSENT] = number in run.absent
                stack.callback(vars(blocks[number]).pop, _ABSENT)
                kinds[type(blocks[number])] = None
        for kind in kinds:
            torch.compiler.allow_in_graph(call_block)
            stack.enter_context(replace_attribute(kind, "forward", _mark_calls(kind.forward)))
        yield


_ABSENT = "_flowrun_absent"  # an attribute of blocks of a run, while torch traces


def _mark_calls(whole: Callable[..., object]) -> Callable[..., object]:
    def forward(self: nn.Module, x: Tensor, /, *args: object, **kwargs: object) -> object:
        absent = getattr(self, _ABSENT, None)
        if absent is not None:
            x = call_block(x, *args, **kwargs)
        return x if absent else whole(self, x, *args, **kwargs)

    return forward
