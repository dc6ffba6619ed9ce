"""The command line: read the arguments, call one function, print; `flowrun --help` lists commands.

Exit status: 0, 1 a run failed, 2 the recipe is wrong (nothing was started), 75 a run was asked to
end and has saved all (the same command goes on with train.resume=auto), 130 Ctrl-C.
"""

from __future__ import annotations

import atexit
import gc
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

from flowrun.engine.runtime.process import heap
from flowrun.engine.runtime.process.call_stack import in_one_chunk
from flowrun.launcher.command_line.app import app, show_errors
from flowrun.launcher.platforms import siblings
from flowrun.launcher.terminal import doing
from flowrun.launcher.terminal.exit_status import INTERRUPTED, OK, PREEMPTED

# isort: off
# each registers its commands: in this order `flowrun --help` lists them
from flowrun.launcher.command_line import train_commands  # noqa: F401
from flowrun.launcher.command_line import model_commands  # noqa: F401
from flowrun.launcher.command_line import measure_commands  # noqa: F401
from flowrun.launcher.command_line import start_commands  # noqa: F401
# isort: on

COMMANDS = tuple(
    each.name or getattr(each.callback, "__name__", "") for each in app.registered_commands
)
_FIRST_STEPS = """flowrun trains any PyTorch model in any mix of parallelism, from one YAML recipe.

  flowrun recipe=gpt_hybrid        a first run: four ranks, one minute
  flowrun plan recipe=gpt_hybrid   what a run would do; starts nothing
  flowrun recipes                  the recipes that there are
  flowrun init my_models.Net       a recipe for a model of yours, or a folder of Hugging Face's
  flowrun runs                     the runs that there are
  flowrun --help                   all commands
"""
_OPTIONS = ("--help", "-h", "--version", "--install-completion", "--show-completion")
_COMPLETES = "_FLOWRUN_COMPLETE"  # typer's name for it
_READ_RECIPES = ("run", "plan", "verify", "resume", "report")
_STARTS_RANKS = ("run", "resume", "calibrate")  # from this process, whose heap they inherit
_TRAINS = ("run", "resume")


@in_one_chunk
def main(arguments: list[str] | None = None) -> NoReturn:
    """The console script.  Ends with SystemExit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _replace_closed_streams()
    if _COMPLETES in os.environ:  # the shell's script asks; what it has typed is in the environment
        app(given, prog_name="flowrun")
    if not given:
        typer.echo(_FIRST_STEPS, nl=False)
        raise SystemExit(OK)
    if given == ["help"]:
        given = ["--help"]
    elif given[0] not in (*COMMANDS, *_OPTIONS):
        given = ["run", *given]
    if arguments is None:
        _prepare_process(given)
    try:
        with show_errors(given[1:], None):
            _check_words(given)
    except typer.Exit as ended:
        raise SystemExit(ended.exit_code) from None
    try:
        app(given, prog_name="flowrun")
    except (KeyboardInterrupt, SystemExit) as ended:
        # typer ends on Ctrl-C in silence, and with a traceback while it builds the commands
        cause = getattr(ended.__context__, "__cause__", None)
        if KeyboardInterrupt not in (type(ended), type(cause)):
            raise
        doing.clear()
        typer.echo("stopped", err=True)
        raise SystemExit(INTERRUPTED) from None
    finally:
        siblings.dismiss(getattr(sys.exc_info()[1], "code", siblings.FAILED))
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler and arguments is None:
            signal.signal(signal.SIGINT, _end_at_once)  # Python shows a traceback as it shuts down
    raise SystemExit(OK)


def _replace_closed_streams() -> None:
    """Write to nowhere where stdout or stderr was closed before the process began."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _prepare_process(given: Sequence[str]) -> None:
    """Set the heap, the signals and the line of progress of a process that is the command alone."""
    atexit.register(gc.freeze)  # an exit looks through all objects for garbage else: 0.5 s
    if given[0] in _STARTS_RANKS:
        heap.reexec_with_tunables()
    if given[0] in _TRAINS:
        signal.signal(signal.SIGTERM, _end_at_once)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, _end_at_once)
    if given[0] in _READ_RECIPES and not {"--help", "-h"} & {*given}:
        doing.doing("reading the recipe")


def _end_at_once(number: int, frame: object) -> NoReturn:
    """End on SIGTERM or Ctrl-C while nothing is to be saved; a run has a handler of its own.

    An error would be lost where an import calls it from C code, or catches all that is raised.
    """
    with suppress(RuntimeError):  # it comes in the midst of a line
        doing.clear()
    ctrl_c = number == signal.SIGINT
    os.write(2, b"stopped\n" if ctrl_c else b"stopped by SIGTERM\n")
    siblings.dismiss(status := INTERRUPTED if ctrl_c else PREEMPTED, within_s=0)
    os._exit(status)


def _check_words(given: Sequence[str]) -> None:
    """Refuse a command that is none, and an option that is none: what other programs write as
    `--steps 5` is `train.steps=5` here.
    """
    command = typer.main.get_command(app).commands.get(given[0])  # type: ignore[attr-defined]
    if command is None:
        return
    options = {name for each in command.params for name in each.opts if name[0] == "-"}
    options |= {"--help", "-h"}
    for text in given[1:]:
        if text.startswith("--") and text.partition("=")[0] not in options:
            from flowrun.launcher.recipe.recipe_errors import bad_option

            raise bad_option(text, sorted(options))
    if given[0] == "run" and len(given) > 1 and given[1].isalpha():
        from flowrun.launcher.recipe.recipe_errors import bad_command

        if error := bad_command(given[1], COMMANDS):
            raise error


@app.callback(invoke_without_command=True)
def _flowrun(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)
    ] = False,
) -> None:
    if version:
        typer.echo(f"flowrun {importlib.metadata.version('flowrun')}")
        raise typer.Exit(OK)


if __name__ == "__main__":
    main()
