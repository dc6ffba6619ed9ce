"""The page in Chromium, where it and playwright are installed: it answers to a person."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrun.launcher.job.job import Job
from flowrun.launcher.page.make_page import plan_page, write_page
from flowrun.launcher.recipe.compose import load

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


def opened(browser: Any, file: Path, width: int = 1280) -> tuple[Any, list[str]]:
    """A page that has drawn itself, and what it wrote to the console or asked a network for."""
    page, said = browser.new_page(viewport={"width": width, "height": 900}), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-drawn]")
    return page, [each for each in said if each != file.as_uri()]


@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_draws_itself_without_errors_and_fits(
    browser: Any, plan_file: Path, width: int
) -> None:
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
    canvas, told = page.locator("#timeline canvas"), page.locator(".said")
    canvas.focus()
    page.keyboard.press("ArrowRight")
    first = told.inner_text()
    page.keyboard.press("ArrowRight")
    assert "update reader" in first and told.inner_text() not in ("", first)
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
    page.fill("#timeline input", "head.")
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
