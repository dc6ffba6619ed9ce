import pytest

from flowrun.engine.runtime.process.environment import VARIABLES, LibraryVariable, unset_variables

each = pytest.mark.parametrize("row", VARIABLES, ids=lambda row: row.names[0])


@each
def test_a_variable_is_set_for_those_that_it_concerns(row: LibraryVariable) -> None:
    assert row.why and row.source
    assert unset_variables({}, True, "eth0")[row.names[0]] == row.value.format(interface="eth0")
    assert (row.names[0] in unset_variables({}, False, "eth0")) is not row.several
    assert (row.names[0] in unset_variables({}, True, "")) is ("{interface}" not in row.value)


@each
def test_a_users_own_value_wins_under_each_of_its_names(row: LibraryVariable) -> None:
    for name in row.names:
        found = unset_variables({name: "mine"}, True, "eth0")
        assert found.keys().isdisjoint(row.names) and len(found) == len(VARIABLES) - 1
