import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flowrun.launcher.bench.load_suite import load_suite
from flowrun.launcher.bench.results import ResultLine
from flowrun.launcher.bench.show_results import draw, table, wanted_s
from flowrun.launcher.bench.suite import FLOWRUN, Suite

ROW = ResultLine(
    experiment="zero3", title="data 2, ZeRO 3", side="FSDP9", mode="eager", setting="as is"
)
PEER = replace(
    ROW,
    **{"side": "FSDP2", "rounds": 3, "median_s": 0.767, "min_s": 0.704, "ratio": 0.8},
    **{"at_most": 0.70, "peak_bytes": 321_000_000, "losses_apart": 3e-7, "agree": True},
)
OURS = replace(
    ROW,
    **{"side": FLOWRUN, "setting": "", "rounds": 3, "median_s": 0.612, "min_s": 0.585},
    **{"efficiency": 0.91, "at_least": 0.90, "peak_bytes": 265_000_000, "foreseen_s": 0.55},
    **{"sent_bytes": 66_000_000, "per_s": 3346.4, "unit": "tokens"},
)
KEPT = replace(PEER, setting="pages kept", ratio=0.7, at_most=0.76, agree=False, losses_apart=0.2)
FAILED = replace(ROW, problem="ImportError: no [fsdp9] here (log)")
NOT_RUN = replace(ROW, setting="pages kept")
LINES = (OURS, PEER, KEPT, FAILED, NOT_RUN)


@pytest.fixture
def suite() -> Suite:
    return load_suite(["suite=peers"])[0]


def shown(suite: Suite, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as text:
        console.print(table(suite, LINES))
    return text.get().splitlines()


@pytest.mark.parametrize("width", [100, 140])
def test_a_line_holds_its_numbers_its_bound_and_whether_it_holds(suite: Suite, width: int) -> None:
    rows = {" ".join(row.split()) for row in shown(suite, width)}
    assert rows >= {
        "data 2, ZeRO 3 3,346 tokens/s",
        "flowrun 612 585 550 91% >= 90% yes 265 66.0",
        "FSDP2, as is 767 704 0.80 <= 0.70 no 321 3e-07",
        "FSDP2, pages kept 767 704 0.70 <= 0.76 yes 321 2e-01",
        "FSDP9, as is failed",
        "FSDP9, pages kept -",
    }
    assert max(map(len, shown(suite, width))) <= width


def test_a_reason_is_printed_as_it_is(suite: Suite) -> None:
    assert "ImportError: no [fsdp9] here (log)" in " ".join(" ".join(shown(suite, 140)).split())


def test_flowrun_is_to_meet_the_hardest_of_its_bounds() -> None:
    assert wanted_s(OURS, LINES) == pytest.approx(0.767 * 0.70)
    assert wanted_s(replace(OURS, mode="compiled"), LINES) is None


def test_the_plot_is_drawn_of_what_ran(suite: Suite, tmp_path: Path) -> None:
    file = tmp_path / "bench.svg"
    assert draw(suite, LINES, file)
    assert file.read_text().count("<svg") == 1
    assert not draw(suite, (FAILED, NOT_RUN), tmp_path / "none.svg")
