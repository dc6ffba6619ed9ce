"""What the pages tell a reader to write composes: every `flowrun` command and every piece of YAML.

Nothing is built and nothing runs, so files and classes of the reader's own need not be there.
"""

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from flowrun.engine.errors import RecipeError
from flowrun.launcher.bench.load_suite import load_suite
from flowrun.launcher.bench.suite import Suite, round_of
from flowrun.launcher.cli import COMMANDS
from flowrun.launcher.recipe.compose import load, spell
from flowrun.launcher.recipe.schema import RecipeSchema

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs" / "make"))

import command_help  # noqa: E402

RUNS = "5_text_to_chat"  # its commands read files that it has the reader write: a test runs it all
PAGES = (
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.stem != RUNS),
)
USUAL = "defaults: [/model: gpt_tiny, /data: text, /optim: adamw, /launch: local]\n"
OF_A_RUN = "recipe=gpt_hybrid"  # what a run folder of the pages may have trained
OPTIONS = {  # with values
    *("--follow", "--to", "--save-recipe", "--cfg", "--level", "--step", "--config-dir"),
    *("--hosts", "--volume", "--image", "--gpu", "--html", "--format"),
}
NO_RECIPE = {
    *("recipes", "export", "tokenizer", "sample", "calibrate", "runs", "status", "init"),
    *("schema", "check", "top"),
}
REFUSED = "exit status 2"  # said behind a command that is to fail


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> Iterator[str]:
    """Of shell code, one a line or behind `&&`; and those between backticks that name a recipe and
    leave nothing out.
    """
    for line in "".join(blocks(text, "bash")).replace("\\\n", " ").splitlines():
        code, _, comment = line.partition(" #")
        refused = f" # {REFUSED}" if REFUSED in comment else ""
        yield from (part.strip() + refused for part in code.split("&&"))
    for quoted in re.findall(r"`(flowrun [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if "recipe=" in quoted and not re.search("…|that/", quoted):
            yield " ".join(quoted.split())


def snippets(text: str) -> Iterator[str]:
    """Pieces of a recipe, made whole.  Indented ones are of `optim`; lines that give one key again
    are alternatives.
    """
    for block in blocks(text, "yaml"):
        keys = re.findall(r"^(\w+):", block, re.MULTILINE)
        for piece in [block] if len(set(keys)) == len(keys) else block.splitlines(keepends=True):
            whole = f"optim:\n{piece}" if piece.startswith(" ") else piece
            yield whole if "defaults:" in whole else USUAL + whole


def of_pages(found: Callable[[str], Iterator[str]]) -> dict[str, str]:
    """What is found on the pages and in the commands' help, each once -> the page that has it."""
    texts = {page.stem: page.read_text() for page in PAGES} | {"help": command_help.page()}
    return {text: name for name in texts for text in found(texts[name])}


COMMANDS_OF_PAGES = [
    pytest.param(line, id=f"{page}: {line}")
    for line, page in of_pages(commands).items()
    if re.match(r"\S*flowrun ", line)
]
SNIPPETS = [
    pytest.param(snippet, id=f"{page} {k}")
    for k, (snippet, page) in enumerate(of_pages(snippets).items())
]


def test_there_is_something_to_compose() -> None:
    assert len(COMMANDS_OF_PAGES) > 20 and len(SNIPPETS) > 10


@cache
def load_once(overrides: tuple[str, ...]) -> None:
    """Compose; pages and suites ask for many recipes again."""
    load(list(overrides))


def values_of(override: Any) -> list[str]:
    """The values that an argument gives to its key; of an interval its ends."""
    if override.is_interval_sweep():
        return [str(override.value().start), str(override.value().end)]
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    return [override.get_value_string()]


def composed(line: str) -> None:
    """Compose what a command would; a sweep, every combination."""
    _, *given = shlex.split(line, comments=True)
    command = given.pop(0) if given[0] in COMMANDS else "run"
    if command == "manifest":
        given.pop(0)  # a platform
    for option in OPTIONS & {*given}:
        at = given.index(option)
        del given[at : at + 2]
        if option == "--config-dir":  # a profile of the reader's own
            given.remove("hardware=mine")
    overrides = [text for text in given if "=" in text.removeprefix("--")]
    others = {"resume", "eval", "report", *NO_RECIPE}
    assert set(given) - set(overrides) <= {"-m"} or command in others, line
    if command == "calibrate" and overrides:
        load(overrides)
        return
    if command in NO_RECIPE or (command == "report" and not overrides):
        assert not overrides or command in ("init", "check")
        return
    if command == "bench":
        suite, _ = load_suite(overrides)
        if isinstance(suite, Suite):
            recipes = {run.overrides for run in round_of(suite)}
        else:  # every row: launcher/bench/foreseen
            recipes = {table.rows[0].overrides for table in suite.tables}
        for each in sorted(recipes)[:: max(1, len(recipes) - 1)]:  # all of them: tests of bench
            load_once(each)
        return
    if command in ("resume", "eval"):
        overrides.insert(0, OF_A_RUN)
    parsed = OverridesParser.create().parse_overrides(spell(overrides))
    choices = [values_of(each) for each in parsed]
    assert "-m" in given or all(len(each) == 1 for each in choices), line
    keys = [text.partition("=")[0] for text in spell(overrides)]
    for values in product(*choices):
        load_once(tuple(f"{key}={value}" for key, value in zip(keys, values, strict=True)))


@pytest.mark.parametrize("line", COMMANDS_OF_PAGES)
def test_a_command_composes(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if REFUSED in line:
        with pytest.raises(RecipeError):
            composed(line)
    else:
        composed(line)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_piece_of_yaml_composes(
    snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "snippet.yaml").write_text(snippet)
    load(["recipe=snippet.yaml"])


KEY = re.compile(
    rf"`({'|'.join(field.name for field in fields(RecipeSchema))})\.([\w.]+)(?:=[^`]*)?`"
)


def is_key(section: str, rest: str) -> bool:
    """True if the schema has the key; what lies below a key of any content is not looked at."""
    at: Any = get_type_hints(RecipeSchema)[section]
    for name in rest.split("."):
        if not is_dataclass(at):
            return True
        hints = get_type_hints(at)
        if name not in hints:
            return False
        at = hints[name]
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_key_that_a_page_names_exists(page: Path) -> None:
    named = {found.groups() for found in KEY.finditer(page.read_text())}
    assert [
        ".".join(key) for key in named if not is_key(*key) and ".safetensors" not in key[1]
    ] == []


def test_a_key_that_is_none_is_seen() -> None:
    assert not is_key("train", "step") and is_key("train", "steps")
    assert is_key("launch", "slurm.minutes") and is_key("model", "width")
