"""A plan as JSON and as one file of HTML."""

import json
import re
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from flowrun.launcher.job.job import Job
from flowrun.launcher.page import page_data, step_view
from flowrun.launcher.page.make_page import plan_page, to_html, write_page
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.terminal.as_json import VERSION, to_json

MOST_BYTES = 4_000_000
SCHEMA = json.loads(Path(page_data.__file__).with_name("page.schema.json").read_text())


@cache
def planned(*keys: str) -> Job:
    return Job(load([*keys, "hardware=cpu"]), values=False)


@cache
def made(*keys: str) -> Any:
    return json.loads(to_json(plan_page(planned(*keys))))


HYBRID = ("recipe=gpt_hybrid",)


@pytest.mark.parametrize("name", ["gpt_hybrid", "mlp_hybrid", "moe_ep", "gpt_zero"])
def test_the_json_is_as_its_schema_says(name: str) -> None:
    jsonschema.validate(made(f"recipe={name}"), SCHEMA)


def test_the_schema_has_every_field_and_no_other() -> None:
    views = {n: view for n, view in vars(page_data).items() if is_dataclass(view)}
    listed = {name: [*each["properties"]] for name, each in SCHEMA["$defs"].items()}
    found = {name: [field.name for field in fields(view)] for name, view in views.items()}
    found["Page"].insert(0, "version")
    assert listed == found
    assert SCHEMA["$defs"]["Page"]["properties"]["version"]["const"] == VERSION


def test_equal_blocks_are_one_and_boxings_stand_between_modules() -> None:
    plan = made(*HYBRID)["plan"]
    paths = [module["path"] for module in plan["modules"]]
    assert "blocks.0-1.attn.qkv" in paths and "blocks.2-3.attn.qkv" in paths
    sent = [edge for edge in plan["edges"] if edge["phase"] == "forward" and edge["boxings"]]
    between = {(paths[e["source"]], paths[e["target"]]): e["boxings"][0] for e in sent}
    assert between["embed", "blocks.0-1.ln1"]["change"] == "P -> B"
    assert between["blocks.0-1", "blocks.2-3.ln1"]["what"] == "send"
    assert all(box["bytes"] > 0 and box["seconds"] > 0 for box in between.values())


def test_traffic_comes_to_the_bytes_of_the_rehearsal() -> None:
    job = planned(*HYBRID)
    sent = sum(each["bytes"] for each in made(*HYBRID)["plan"]["traffic"])
    assert sent == pytest.approx(job.training.rehearsal.sent_bytes)


def test_each_stage_computes_waits_or_idles_through_the_step() -> None:
    plan = made(*HYBRID)["plan"]
    whole = sum(spent for _, spent in plan["bounds"])
    for stage in plan["stages"]:
        parts = (*stage["seconds"].values(), stage["exposed_s"], stage["idle_s"])
        assert sum(parts) == pytest.approx(whole) and min(parts) >= 0


def test_memory_comes_to_the_peak_of_the_rehearsal_with_the_pages_of_messages() -> None:
    for stage in made(*HYBRID)["plan"]["stages"]:
        assert stage["memory"]["messages"][-1] > 0
        assert max(map(sum, zip(*stage["memory"].values(), strict=True))) == stage["peak_bytes"]


def test_columns_of_a_drawing_have_an_entry_for_each_act() -> None:
    drawing = made(*HYBRID)["plan"]["drawing"]
    columns = ("lane", "actor", "act", "start", "length", "cause", "why", "register")
    (acts,) = {len(drawing[name]) for name in columns}
    assert acts == len(planned(*HYBRID).training.rehearsal.first_step)
    assert drawing["start"] == sorted(drawing["start"])
    stashes = {r for r, slots in drawing["slots"].items() if slots < 0}
    assert stashes == {str(r.id) for r in planned(*HYBRID).training.plan.registers if r.stash}


def test_of_more_acts_than_a_page_holds_some_stages_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = made(*HYBRID)["plan"]["drawing"]
    monkeypatch.setattr(step_view, "MOST_ACTS", len(whole["lane"]) - 1)
    drawing = plan_page(planned(*HYBRID)).plan.drawing
    assert len(drawing.lanes) == 1 and "of 2 stages" in drawing.about
    assert max(drawing.cause) < len(drawing.lane) and {*drawing.lane} == {0}


def test_of_several_updates_a_page_says_that_it_draws_the_first() -> None:
    notes = made("recipe=gan_images")["plan"]["notes"]
    assert "what is drawn is of the first alone" in notes[-1]
    assert not any("is drawn" in note for note in made(*HYBRID)["plan"]["notes"])


def test_a_page_is_one_file_that_asks_no_network_for_anything(tmp_path: Path) -> None:
    said = write_page(plan_page(planned(*HYBRID)), tmp_path / "new" / "page.html")
    text = (tmp_path / "new" / "page.html").read_text()
    assert len(text.encode()) < MOST_BYTES and "page.html is written: 1" in said
    assert not re.search(r"""(src|href)=["'](?!#|data:)""", text)
    assert "default-src 'none'" in text and "/*data*/" not in text


def test_no_text_of_a_recipe_ends_the_script() -> None:
    text = to_html(plan_page(planned(*HYBRID, "name='</script><b>'")))
    assert "<b>'" not in text and "\\u003c/script>\\u003cb>" in text


@pytest.mark.thorough
def test_the_page_of_16384_ranks_is_small() -> None:
    assert len(to_html(plan_page(planned("recipe=llama3_405b", "hardware=h100")))) < MOST_BYTES


@pytest.mark.parametrize("name", ["gpt_hybrid", "gpt_pp", "moe_ep"])
def test_a_stage_computes_waits_for_messages_or_is_idle(name: str) -> None:
    """Messages that overlap, or that compute hides, count once or not at all."""
    plan = made(f"recipe={name}")["plan"]
    drawing = plan["drawing"]
    ends = (
        start + length for start, length in zip(drawing["start"], drawing["length"], strict=True)
    )
    total = max(ends) * drawing["tick_s"]
    for stage in plan["stages"]:
        spent = sum(stage["seconds"].values()) + stage["exposed_s"] + stage["idle_s"]
        assert spent == pytest.approx(total, rel=1e-4)
