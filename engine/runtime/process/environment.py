"""Environment variables of the libraries that a rank uses, set before it opens a device or meets
the others.  A user's own value wins, whichever of a row's names it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class LibraryVariable(NamedTuple):
    """names: the first is set.  value: with {interface}, the network's, where that is known.
    several: it is set only where several ranks are on CUDA.
    """

    names: tuple[str, ...]
    value: str
    why: str
    source: str
    several: bool = True


_CUDA = "CUDA programming guide, environment variables"
_NCCL = "NCCL user guide, environment variables"
VARIABLES = (
    LibraryVariable(
        ("GLOO_SOCKET_IFNAME",),
        "{interface}",
        "gloo would listen where the name of this host leads",
        "torch.distributed, common environment variables",
        several=False,
    ),
    LibraryVariable(
        ("NCCL_SOCKET_IFNAME",),
        "={interface}",  # =: this one, and not each whose name begins so
        "NCCL would take the first network that it finds",
        _NCCL,
    ),
    LibraryVariable(
        ("NCCL_RUNTIME_CONNECT",),
        "0",
        "rings and trees are connected where a group is made, in one order on all ranks",
        _NCCL,
    ),
    LibraryVariable(
        ("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",),
        "false",
        "messages of a direction are to go one after the other (engine/rehearsal/launches.py)",
        "ProcessGroupNCCL.cpp, pointToPoint",
    ),
    LibraryVariable(
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING",),
        "1",
        "a collective that fails ends its process",
        "ProcessGroupNCCL.hpp, ErrorHandlingMode",
    ),
    LibraryVariable(
        ("CUDA_MODULE_LOADING",),
        "EAGER",
        "the first launch of a kernel may wait for all that runs: for a message, and its sender",
        f"{_CUDA}; lazy loading, potential hazards",
    ),
    LibraryVariable(
        ("CUDA_DEVICE_MAX_CONNECTIONS",),
        "32",
        "of 8 queues, streams share one, and wait for each other's messages",
        _CUDA,
    ),
    LibraryVariable(
        ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        "expandable_segments:True",
        "tensors of unlike sizes, as ZeRO 3 gathers them, leave gaps in blocks of fixed size",
        "torch, notes on CUDA, memory management",
        several=False,
    ),
)


def unset_variables(
    environment: Mapping[str, str], several_on_cuda: bool, interface: str
) -> dict[str, str]:
    """Return what the user has not set.

    several_on_cuda: there are several ranks, on CUDA.  interface: of the network between the hosts;
    "" if it has no name.
    """
    return {
        row.names[0]: row.value.format(interface=interface)
        for row in VARIABLES
        if (several_on_cuda or not row.several)
        and (interface or "{interface}" not in row.value)
        and environment.keys().isdisjoint(row.names)
    }
