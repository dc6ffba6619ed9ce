"""Environment variables of the libraries that a rank uses, set before it opens a device or meets
the others.  A user's own value wins, also under an older name.

Sources: the user guide of NCCL and the programming guide of CUDA (environment variables; potential
hazards of lazy loading), torch.distributed (common environment variables), torch's notes on CUDA
(memory management), pointToPoint of ProcessGroupNCCL.cpp, ErrorHandlingMode of its header.
"""

from __future__ import annotations

from collections.abc import Mapping

# Name -> value, with {interface}, the network's; a row that has it is left out where it has no name
ALL_RANKS = {
    # gloo would listen where the name of this host leads
    "GLOO_SOCKET_IFNAME": "{interface}",
    # tensors of unlike sizes, as ZeRO 3 gathers them, leave gaps in blocks of fixed size
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
SEVERAL_ON_CUDA = {
    # NCCL would take the first network that it finds; =: this one, not each whose name begins so
    "NCCL_SOCKET_IFNAME": "={interface}",
    # rings and trees are connected where a group is made, in one order on all ranks
    "NCCL_RUNTIME_CONNECT": "0",
    # messages of a direction are to go one after the other (engine/rehearsal/launches.py)
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
    # a collective that fails ends its process
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    # the first launch of a kernel may wait for all that runs: for a message, and its sender
    "CUDA_MODULE_LOADING": "EAGER",
    # of 8 queues, streams share one, and wait for each other's messages
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
OLDER_NAMES = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}


def unset_variables(
    environment: Mapping[str, str], several_on_cuda: bool, interface: str
) -> dict[str, str]:
    """Return what the user has not set.

    several_on_cuda: there are several ranks, on CUDA.  interface: of the network between the hosts;
    "" if it has no name.
    """
    return {
        name: value.format(interface=interface)
        for name, value in (ALL_RANKS | (SEVERAL_ON_CUDA if several_on_cuda else {})).items()
        if (interface or "{interface}" not in value)
        and environment.keys().isdisjoint((name, OLDER_NAMES.get(name, name)))
    }
