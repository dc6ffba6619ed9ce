"""The page in Chromium, where it and playwright are installed: it answers to a person."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrun.launcher.job.job import Job
from flowrun.launcher.page.make_page import make_page, plan_page, write_page
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.report.sweep_table import TABLE

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "plan.html"
    write_page(plan_page(Job(load(["recipe=gpt_hybrid", "hardware=cpu"]), values=False)), file)
    return file


@pytest.fixture(scope="module")
def sweep_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of three jobs, one of whose runs had a restart."""
    folder = tmp_path_factory.mktemp("sweep")
    jobs = ((0, 0.1, 3), (1, 0.3, 1), (2, 0.9, 2))
    rows = [f"{job},{lr},{job},ran,,{loss}" for job, lr, loss in jobs]
    keys = "job,optim.lr,schedule.lowest_of_all_rates,status,reason,loss"
    (folder / TABLE).write_text("\n".join((keys, *rows)) + "\n")
    for job in range(3):
        (folder / str(job)).mkdir()
        (folder / str(job) / "recipe.yaml").write_text("name: mine\ntrain: {steps: 9}\n")
        steps = ({"step": k, "loss": 3 / (k + job + 1), "step_s": 0.1} for k in range(9))
        (folder / str(job) / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)))
    (folder / "1" / "restarts.jsonl").write_text('{"reached": 4, "where": "rank 0"}\n')
    write_page(make_page([str(folder)], None), folder / "sweep.html")
    return folder / "sweep.html"


def opened(browser: Any, file: Path, width: int = 1280) -> tuple[Any, list[str]]:
    """A page that has drawn itself, and what it wrote to the console or asked a network for."""
    page, said = browser.new_page(viewport={"width": width, "height": 900}), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-drawn]")
    return page, [each for each in said if each != file.as_uri()]


APART = """[...document.querySelectorAll('#sweep [font-weight]')].map(
  each => each.getBoundingClientRect()).every((a, k, all) => all.slice(k + 1).every(
  b => a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top))"""


@pytest.mark.parametrize("width", [1280, 390])
def test_a_sweep_is_drawn_and_fits(browser: Any, sweep_file: Path, width: int) -> None:
    page, said = opened(browser, sweep_file, width)
    assert said == [] and page.locator("#curves canvas").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert "rank 0" in page.inner_text("#runs")
    heights = "[...document.querySelectorAll('#runs tr')].map(each => each.offsetHeight)"
    assert max(page.evaluate(heights)) < 50 and page.evaluate(APART)


def test_a_job_is_found_by_its_line_and_by_a_filter(browser: Any, sweep_file: Path) -> None:
    page, said = opened(browser, sweep_file)
    assert "best: job 1" in page.inner_text("#sweep")
    page.locator("#sweep circle").nth(0).hover()
    assert "optim.lr = 0.1" in page.inner_text(".hint")
    page.fill("#sweep input", "0.9")
    assert page.locator("#sweep circle").count() == 2  # of each key
    assert "best: job 2" in page.inner_text("#sweep") and said == []


def test_curves_go_over_time_and_name_what_is_pointed_at(browser: Any, sweep_file: Path) -> None:
    page, said = opened(browser, sweep_file)
    page.select_option("#curves select", "time")
    over = page.locator("#curves .u-over").nth(0)
    over.hover(position={"x": 1, "y": 12})
    assert page.locator("#curves h3").nth(0).inner_text().startswith("loss: job 0 loss 3")
    assert said == []


@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_is_drawn_and_fits(browser: Any, plan_file: Path, width: int) -> None:
    page, said = opened(browser, plan_file, width)
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    charts = page.locator("#memory canvas")
    assert [charts.nth(k).bounding_box()["width"] <= width for k in range(charts.count())] == [
        True
    ] * 2


def test_a_pointer_on_an_act_shows_what_it_waited_for(browser: Any, plan_file: Path) -> None:
    page, said = opened(browser, plan_file)
    canvas = page.locator("#timeline canvas")
    box = canvas.bounding_box()
    canvas.hover(position={"x": 110 + (box["width"] - 110) * 0.55, "y": 29 + 26})
    assert "stage 1" in page.inner_text(".hint") and "waited for" in page.inner_text(".hint")
    assert said == []


def test_keys_go_from_act_to_act_and_zoom(browser: Any, plan_file: Path) -> None:
    page, _ = opened(browser, plan_file)
    canvas, text_of_act = page.locator("#timeline canvas"), page.locator(".said")
    canvas.focus()
    page.keyboard.press("ArrowRight")
    first = text_of_act.inner_text()
    page.keyboard.press("ArrowRight")
    assert "(reader)" in first and text_of_act.inner_text() not in ("", first)
    whole = int(canvas.get_attribute("data-acts"))
    page.keyboard.press("+")
    assert int(canvas.get_attribute("data-acts")) < whole
    page.keyboard.press("0")
    assert int(canvas.get_attribute("data-acts")) == whole


def test_a_drag_zooms_and_a_filter_leaves_what_it_names(browser: Any, plan_file: Path) -> None:
    page, _ = opened(browser, plan_file)
    canvas = page.locator("#timeline canvas")
    whole, box = int(canvas.get_attribute("data-acts")), canvas.bounding_box()
    canvas.hover(position={"x": 300, "y": 30})
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 30)
    page.mouse.up()
    assert 0 < int(canvas.get_attribute("data-acts")) < whole
    canvas.dblclick()
    page.fill("#timeline input", "head,")
    named = int(canvas.get_attribute("data-acts"))
    page.click("#timeline button:has-text('backward')")
    assert 0 < int(canvas.get_attribute("data-acts")) < named < whole


def test_a_module_opens_by_a_key_and_shows_its_weights(browser: Any, plan_file: Path) -> None:
    page, _ = opened(browser, plan_file)
    summary = page.locator("summary:has-text('blocks.0-1.attn.qkv')")
    summary.focus()
    page.keyboard.press("Enter")
    node = page.locator("details[open]").inner_text()
    assert "384 x 128" in node and "all-reduce over tensor" in node
