"""The page of all commands, made from the command line's own help."""

from __future__ import annotations

import re
from typing import Any

import typer

from flowrun.launcher.cli import COMMANDS, app

HEAD = """# Command line

`flowrun COMMAND --help` prints the same. The exit status is 0, 1 if a run failed, 2 if the recipe
is wrong (nothing was started), 130 after Ctrl-C. `FLOWRUN_TRACEBACK=1` shows where in flowrun an
error came from; `FLOWRUN_RECIPES=DIR:DIR` adds folders of recipes.

"""


def page() -> str:
    """Return the page, as Markdown."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return HEAD + "\n".join(_command(name, commands[name]) for name in COMMANDS)


def _command(name: str, command: Any) -> str:
    parts = [f"## flowrun {name}", _markdown(command.help or "")]
    rows = [row for parameter in command.params if (row := _row(parameter))]
    if rows:
        parts.append("| argument | meaning |\n| --- | --- |\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
    else:
        name = ", ".join(parameter.opts)
    words = (getattr(parameter, "help", None) or "").replace("|", "\\|")
    return f"| `{name}` | {words} |" if words else ""


def _markdown(text: str) -> str:
    """Turn typer's markup into Markdown: bold words, and examples indented by two spaces."""
    text = re.sub(r"\[bold\](.*?)\[/\]", r"`\1`", text.replace("\\[", "["))
    lines: list[str] = []
    for block in text.strip().split("\n\n"):
        indented = all(line.startswith("  ") for line in block.splitlines())
        body = "\n".join(line.removeprefix("  ") for line in block.splitlines())
        lines.append(f"```bash\n{body}\n```" if indented else body)
    return "\n\n".join(lines)
