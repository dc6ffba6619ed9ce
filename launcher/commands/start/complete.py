"""flowrun completion: what bash offers behind TAB: commands, options, recipes, groups and keys.

The script that it prints asks `flowrun complete -- LINE` for the words that may end a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from flowrun.launcher.recipe.schema import CHOICES, RecipeSchema

GROUPS = ("model", "data", "optim", "parallel", "launch", "hardware")
SUITE = "suite"
_CONF = Path(__file__).resolve().parents[3] / "conf"
BASH = """\
# flowrun completion > ~/.local/share/bash-completion/completions/flowrun
_flowrun() {
  local IFS=$'\\n' line="${COMP_LINE:0:COMP_POINT}"
  local word="${line##* }" cut=""
  case "$word" in *=*) cut="${word%"${word##*=}"}" ;; esac  # bash begins a word behind =
  COMPREPLY=($(flowrun complete -- "$line" 2>/dev/null))
  case "${COMPREPLY[0]-}" in *[=.]) compopt -o nospace 2>/dev/null ;; esac
  COMPREPLY=("${COMPREPLY[@]#"$cut"}")
}
complete -o default -F _flowrun flowrun
"""


def complete_line(line: str, commands: Mapping[str, Sequence[str]]) -> list[str]:
    """Return what the last word of a line may become.

    line: up to the cursor, from `flowrun` on.  commands: name -> options.
    """
    _, *before, word = line.split(" ") if " " in line else ("", line)
    command = before[0] if before and before[0] in commands else "run"
    if word.startswith("-"):
        found: Sequence[str] = commands[command]
    elif "=" in word:
        key, _, value = word.partition("=")
        listed, comma, _ = value.rpartition(",")  # of a sweep
        found = [f"{key}={listed}{comma}{each}" for each in _values(key)]
    else:
        found = [*([] if before else commands), *_keys(word)]
        found += [f"{SUITE}="] if command == "bench" else []
    return sorted({each for each in found if each.startswith(word)})


def _keys(word: str) -> Iterator[str]:
    """Yield keys of the section that a word is in, sections with a dot behind them."""
    yield from ("recipe=", *(f"{group}=" for group in GROUPS))
    section, dot, _ = word.rpartition(".")
    found: Any = _class_of(section)
    if found is None:
        return
    hints = get_type_hints(found)
    for field in fields(found):
        yield f"{section}{dot}{field.name}{'.' if is_dataclass(hints[field.name]) else '='}"


def _class_of(section: str) -> Any:
    """Return the dataclass of a dotted section; None of one that has no keys of its own."""
    found: Any = RecipeSchema
    for name in section.split(".") if section else ():
        found = get_type_hints(found).get(name)
        if not is_dataclass(found):
            return None
    return found


def _values(key: str) -> list[str]:
    """Return the values that a key is known to take."""
    if key == "recipe":
        from flowrun.launcher.recipe.hydra_source import recipe_names

        return [*recipe_names()]
    if key in (*GROUPS, SUITE):
        return [file.stem for file in (_CONF / key).glob("*.yaml")]
    section, _, name = key.rpartition(".")
    if key in CHOICES:
        return [*CHOICES[key]]
    found = _class_of(section)
    return ["true", "false"] if found and get_type_hints(found).get(name) is bool else []
