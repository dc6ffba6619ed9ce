import pytest

from flowrun.engine.ir.sbp import P_LOGSUMEXP, P_MAX, P_MIN, B, P, S, Sbp, format_nd_sbp, parse_sbp


@pytest.mark.parametrize(
    ("text", "sbp"),
    [
        ("S(0)", S(0)),
        ("S0", S(0)),
        (" S( 12 ) ", S(12)),
        ("B", B),
        ("P", P),
        ("P(sum)", P),
        ("P(max)", P_MAX),
        ("P(logsumexp)", P_LOGSUMEXP),
        ("P(min)", P_MIN),
    ],
)
def test_every_written_form_is_read(text: str, sbp: Sbp) -> None:
    assert parse_sbp(text) == sbp


@pytest.mark.parametrize("sbp", [S(0), S(3), B, P, P_MAX, P_MIN, P_LOGSUMEXP], ids=str)
def test_what_is_printed_is_read_again(sbp: Sbp) -> None:
    assert parse_sbp(str(sbp)) == sbp


@pytest.mark.parametrize("text", ["", "S", "S(-1)", "BB", "P(mean)", "s0", "Split(0)"])
def test_another_word_is_refused_with_the_possible_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an SBP; write S\(0\) or S0"):
        parse_sbp(text)


def test_nd_sbp_prints_parentheses_only_for_several_axes() -> None:
    assert [format_nd_sbp((B,)), format_nd_sbp((S(0), P))] == ["B", "(S(0), P)"]
