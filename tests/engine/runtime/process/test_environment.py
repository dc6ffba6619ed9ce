import pytest

from flowrun.engine.runtime.process import environment
from flowrun.engine.runtime.process.environment import unset_variables

VALUES = environment.ALL_RANKS | environment.SEVERAL_ON_CUDA


@pytest.mark.parametrize("name", VALUES)
def test_a_variable_is_set_for_those_that_it_concerns(name: str) -> None:
    assert unset_variables({}, True, "eth0")[name] == VALUES[name].format(interface="eth0")
    assert (name in unset_variables({}, False, "eth0")) is (name in environment.ALL_RANKS)
    assert (name in unset_variables({}, True, "")) is ("{interface}" not in VALUES[name])


@pytest.mark.parametrize("name", [*VALUES, *environment.OLDER_NAMES.values()])
def test_a_users_own_value_wins_under_each_of_its_names(name: str) -> None:
    found = unset_variables({name: "mine"}, True, "eth0")
    assert name not in found and len(found) == len(VALUES) - 1


def test_what_several_ranks_on_cuda_need_is_set() -> None:
    needed = {
        "CUDA_MODULE_LOADING": "EAGER",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "NCCL_RUNTIME_CONNECT": "0",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    assert needed.items() <= unset_variables({}, True, "eth0").items()
