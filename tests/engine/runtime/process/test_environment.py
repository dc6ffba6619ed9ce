import os

import pytest

from flowrun.engine.runtime.process.environment import VARIABLES, LibraryVariable, set_variables


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})


each = pytest.mark.parametrize("row", VARIABLES, ids=lambda row: row.names[0])


@each
def test_a_variable_is_set_for_several_ranks_on_cuda(row: LibraryVariable) -> None:
    set_variables(True, "eth0")
    assert os.environ[row.names[0]] == row.value.replace("{interface}", "eth0")
    assert row.why and row.source


@each
def test_a_users_own_value_wins_under_each_of_its_names(row: LibraryVariable) -> None:
    for name in row.names:
        os.environ.clear()
        os.environ[name] = "mine"
        set_variables(True, "eth0")
        assert {name: os.environ.get(name) for name in row.names} == {
            other: "mine" if other == name else None for other in row.names
        }


@each
def test_a_variable_of_several_ranks_is_theirs_alone(row: LibraryVariable) -> None:
    set_variables(False, "eth0")
    assert (row.names[0] in os.environ) is not row.several


def test_a_network_without_a_name_is_left_to_the_libraries() -> None:
    set_variables(True, "")
    assert {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}.isdisjoint(os.environ)
