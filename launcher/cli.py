"""The command line: read the arguments, call one function, print.

    flowrun recipe=R key=value …          run
    flowrun -m recipe=A,B key=1,2 …       run every combination, compare the jobs
    flowrun plan recipe=R …               show the plan, start nothing
    flowrun verify recipe=R …             compare layouts, step by step
    flowrun resume RUN_DIR …              go on with a run from its last checkpoint
    flowrun export RUN_DIR                its weights as one file, by the model's own names
    flowrun tokenizer --to FOLDER         train a tokenizer on text
    flowrun sample RUN_DIR --prompt TEXT  text that its model writes
    flowrun eval RUN_DIR                  its metrics, without training
    flowrun bench suite=S …               compare with torch's own layouts, in turn
    flowrun calibrate FILE                measure this machine, write a hardware profile
    flowrun runs [FOLDER]                 list runs, compare two, follow one
    flowrun init my_models.Net            write a recipe for a model
    flowrun schema                        the keys of a recipe for editors
    flowrun completion                    a script: what bash offers behind TAB
    flowrun import FILE                   keys of DeepSpeed's or accelerate's file as a recipe
    flowrun recipes                       what there is

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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from flowrun.engine.errors import FlowrunError, RecipeError, RunError
from flowrun.engine.runtime.process import heap
from flowrun.launcher.help_texts import (
    BENCH_HELP,
    CALIBRATE_HELP,
    COMPLETION_HELP,
    EVAL_HELP,
    EXPORT_HELP,
    FIRST_STEPS,
    IMPORT_HELP,
    INIT_HELP,
    PLAN_HELP,
    RESUME_HELP,
    RUN_HELP,
    RUNS_HELP,
    SAMPLE_HELP,
    SCHEMA_HELP,
    TOKENIZER_HELP,
    VERIFY_HELP,
)
from flowrun.launcher.job.garbage import pause_collection
from flowrun.launcher.terminal import doing

COMMANDS = (
    "run",
    "plan",
    "verify",
    "resume",
    "export",
    "sample",
    "eval",
    "tokenizer",
    "bench",
    "calibrate",
    "runs",
    "init",
    "import",
    "schema",
    "completion",
    "recipes",
)
_READ_RECIPES = ("run", "plan", "verify", "resume")
_STARTS_RANKS = ("run", "resume", "calibrate")  # from this process, whose heap they inherit
_TRAINS = ("run", "resume")
OK, RUN_FAILED, RECIPE_WRONG, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130
TRACEBACK = "FLOWRUN_TRACEBACK"  # environment variable: 1 shows where in flowrun an error came from

RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="recipe=NAME [key=value]…", show_default=False)
]
ConfigDir = Annotated[
    str | None,
    typer.Option(
        "--config-dir", help="A folder of your own groups (model/, data/ …), searched first."
    ),
]
Best = Annotated[
    bool, typer.Option("--best", help="Of the checkpoint that is best by train.keep_best.")
]

app = typer.Typer(
    name="flowrun",
    help="One YAML recipe trains any PyTorch model in any mix of parallelism.\n\n"
    "flowrun recipe=NAME key=value … runs a recipe; `flowrun recipes` lists them, "
    "`flowrun run --help` says more.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: list[str] | None = None) -> NoReturn:
    """The console script.  Ends with SystemExit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before we began
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if given[:2] == ["complete", "--"]:
        raise SystemExit(_complete(" ".join(given[2:])))
    if not given:
        typer.echo(FIRST_STEPS, nl=False)
        raise SystemExit(OK)
    if given == ["help"]:
        given = ["--help"]
    elif given[0] not in (*COMMANDS, "--help", "-h", "--version"):
        given = ["run", *given]
    if arguments is None:
        atexit.register(gc.freeze)  # an exit looks through all objects for garbage else: 0.5 s
        if given[0] in _STARTS_RANKS:
            heap.reexec_with_tunables()
        if given[0] in _TRAINS:
            signal.signal(signal.SIGTERM, _end_before_start)
        if given[0] in _READ_RECIPES and not {"--help", "-h"} & {*given}:
            doing.doing("reading the recipe")
    try:
        with _errors_shown(given[1:], None):
            _check_words(given)
    except typer.Exit as ended:
        raise SystemExit(ended.exit_code) from None
    try:
        app(given, prog_name="flowrun")
    except SystemExit as ended:
        cause = getattr(ended.__context__, "__cause__", None)  # typer ends on Ctrl-C in silence
        if isinstance(cause, KeyboardInterrupt):
            doing.clear()
            typer.echo("stopped", err=True)
        raise
    raise SystemExit(OK)


def _complete(line: str) -> int:
    """Print what the last word of a line may become, for the script of `flowrun completion`."""
    from flowrun.launcher.commands.start.complete import complete_line

    group: Any = typer.main.get_command(app)
    options = {
        name: [text for each in group.commands[name].params for text in each.opts if text[0] == "-"]
        for name in COMMANDS
    }
    for found in complete_line(line, options):
        typer.echo(found)
    return OK


def _end_before_start(number: int, frame: Any) -> NoReturn:
    """End on SIGTERM while there is nothing to save; a run has a handler of its own.

    An error would be lost where an import calls it from C code.
    """
    with suppress(RuntimeError):  # it comes in the midst of a line
        doing.clear()
    os.write(2, b"stopped by SIGTERM\n")
    os._exit(PREEMPTED)


def _check_words(given: Sequence[str]) -> None:
    """Refuse a command that is none, and an option that is none: what other programs write as
    `--steps 5` is `train.steps=5` here.
    """
    command = typer.main.get_command(app).commands.get(given[0])  # type: ignore[attr-defined]
    if command is None:
        return
    options = {name for each in command.params for name in each.opts} | {"--help", "-h"}
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


@app.command(help=RUN_HELP)
def run(
    overrides: Overrides = None,
    multirun: Annotated[
        bool,
        typer.Option(
            "--multirun", "-m", help="Run every combination of key=a,b,c; ends with a table."
        ),
    ] = False,
    config_dir: ConfigDir = None,
    cfg: Annotated[
        str | None,
        typer.Option(
            "--cfg", metavar="job|hydra|all", help="Show the composed keys instead of running."
        ),
    ] = None,
    resolve: Annotated[
        bool, typer.Option("--resolve", help="With --cfg: replace ${…} by values.")
    ] = False,
    package: Annotated[
        str | None, typer.Option("--package", "-p", help="With --cfg: this key only.")
    ] = None,
    info: Annotated[
        str | None,
        typer.Option("--info", metavar="searchpath|defaults|…", help="Show what Hydra did."),
    ] = None,
) -> None:
    """Train a recipe (see RUN_HELP)."""
    given = overrides or []
    flags = ["--multirun"] * multirun + ["--resolve"] * resolve
    for flag, value in (
        ("--config-dir", config_dir),
        ("--cfg", cfg),
        ("--package", package),
        ("--info", info),
    ):
        flags += [flag, value] if value is not None else []
    with _errors_shown(given, config_dir):
        from flowrun.launcher.hydra_jobs import hydra_jobs

        outcomes = hydra_jobs(given, flags, config_dir)
        failed = [outcome for outcome in outcomes if isinstance(outcome, FlowrunError)]
        if failed and not multirun:
            raise failed[0]
        if any(isinstance(outcome, RunError) for outcome in failed):
            raise typer.Exit(RUN_FAILED)
        if failed and len(failed) == len(outcomes):
            raise typer.Exit(RECIPE_WRONG)


@app.command(help=PLAN_HELP)
def plan(
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
    save_recipe: Annotated[
        Path | None,
        typer.Option("--save-recipe", help="With auto.placement: the file of the best recipe."),
    ] = None,
    level: Annotated[
        str | None,
        typer.Option("--level", metavar="NAME", help="Print this level of the compiler instead."),
    ] = None,
) -> None:
    """Show the plan (see PLAN_HELP)."""
    given = overrides or []
    with _errors_shown(given, config_dir):
        recipe = _load(given, config_dir)
        if save_recipe and not recipe.auto.placement:
            raise RecipeError(
                "auto.placement",
                "--save-recipe writes the recipe that a search has found, and none is asked for.",
                "Add auto.placement=true.",
            )
        if level:
            from flowrun.launcher.run import plan_level

            text = plan_level(recipe, level)
        else:
            from flowrun.launcher.run import plan as plan_recipe

            text = str(plan_recipe(recipe, given, save_recipe))
        doing.clear()
        typer.echo(text)


@app.command(help=VERIFY_HELP)
def verify(overrides: Overrides = None, config_dir: ConfigDir = None) -> None:
    """Compare layouts (see VERIFY_HELP)."""
    given = overrides or []
    with _errors_shown(given, config_dir):
        chosen = any(text.startswith("launch") for text in given)
        recipe = _load(given if chosen else [*given, "launch=virtual"], config_dir)
        from flowrun.launcher.run import verify as verify_layouts

        found = verify_layouts(recipe)
        doing.clear()
        _print_rows(found.rows)
        typer.echo(found.caption)
        if not all(row.ok for row in found.rows):
            raise typer.Exit(RUN_FAILED)


@app.command(help=RESUME_HELP)
def resume(
    run_folder: RunFolder,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]…", show_default=False)
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", help="Of the checkpoint to go on from; without it the last."),
    ] = None,
    best: Best = False,
    config_dir: ConfigDir = None,
) -> None:
    """Go on with a run (see RESUME_HELP)."""
    file = run_folder / "recipe.yaml"
    with _errors_shown([f"recipe={file}", *(overrides or [])], config_dir):
        from flowrun.launcher.commands.resume import checkpoint_of, compose_resumed

        start = checkpoint_of(run_folder, step, best)
        recipe = compose_resumed(start, overrides or [], config_dir)
        from flowrun.launcher.report.progress import Progress
        from flowrun.launcher.run import run as run_recipe

        run_recipe(recipe, run_folder, Progress(), start)


@app.command(help=EXPORT_HELP)
def export(
    run_folder: RunFolder,
    step: Annotated[
        int | None, typer.Option("--step", help="Of the checkpoint; without it the newest weights.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", help="The file, or a folder (it ends with /); without it in the run's folder."
        ),
    ] = None,
    best: Best = False,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="The adapters alone, in a folder of peft's.")
    ] = False,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="safetensors|hf",
            help="One file of weights, or a folder that transformers' from_pretrained loads.",
        ),
    ] = "safetensors",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", metavar="fp32|bf16|fp16", help="With --format hf: that of the weights."
        ),
    ] = "",
) -> None:
    """Write the weights of a run (see EXPORT_HELP)."""
    with _errors_shown([f"recipe={run_folder / 'recipe.yaml'}"], None):
        from flowrun.launcher.commands.export import check_format, describe_file
        from flowrun.launcher.commands.export import export as export_weights

        check_format(format, dtype, adapters)
        if format == "hf":
            from flowrun.launcher.commands.export_folder import export_folder

            target = Path(to) if to else None
            written = export_folder(run_folder, target, step=step, best=best, dtype=dtype)
            typer.echo("\n".join(written.lines()))
        else:
            typer.echo(describe_file(export_weights(run_folder, step, to, best, adapters)))


@app.command(help=SAMPLE_HELP)
def sample(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="Folder of a run, of a checkpoint, or of Hugging Face's.",
            show_default=False,
        ),
    ],
    prompt: Annotated[str, typer.Option("--prompt", help="The text to go on from.")] = "",
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="The prompt is a question, by the chat template; without one, each line typed is.",
        ),
    ] = False,
    tokens: Annotated[int, typer.Option("--tokens", help="The most tokens to write.", min=1)] = 128,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature", help="Divides the logits; 0: always the likeliest token.", min=0
        ),
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option("--top-k", help="Draw from the likeliest K tokens; 0: from all.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of the random numbers.")] = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="A folder or file, or the word bytes, where the source names none.",
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", help="Of the checkpoint; without it the newest weights.")
    ] = None,
    best: Best = False,
) -> None:
    """Write text with a model (see SAMPLE_HELP)."""
    doing.doing("reading the model")
    with _errors_shown([f"recipe={source / 'recipe.yaml'}"], None):
        from flowrun.launcher.commands.sample import go_on, open_source, talk
        from flowrun.launcher.text.generate import Drawing

        drawing = Drawing(tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
        model, codec = open_source(source, step, best, tokenizer)
        doing.clear()
        if chat:
            questions = [prompt] if prompt else _read_questions()
            for answer in talk(model, codec, questions, drawing):
                _print_pieces(answer)
        else:
            typer.echo(prompt, nl=False)
            _print_pieces(go_on(model, codec, prompt, drawing))


def _read_questions() -> Iterator[str]:
    """Yield lines of the standard input, until its end."""
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _print_pieces(pieces: Iterable[str]) -> None:
    """Print a text as it is made."""
    from flowrun.launcher.terminal.console import printable

    for piece in pieces:
        typer.echo(printable(piece), nl=False)
    typer.echo()


@app.command("eval", help=EVAL_HELP)
def evaluate(
    run_folder: RunFolder,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]…", show_default=False)
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", help="Of the checkpoint; without it the newest weights.")
    ] = None,
    best: Best = False,
    config_dir: ConfigDir = None,
) -> None:
    """Evaluate a run (see EVAL_HELP)."""
    given = overrides or []
    doing.doing("reading the model")
    with _errors_shown([f"recipe={run_folder / 'recipe.yaml'}", *given], config_dir):
        from flowrun.launcher.commands.evaluate import evaluate as evaluate_run

        found = evaluate_run(run_folder, given, step=step, best=best, config_dir=config_dir)
        doing.clear()
        typer.echo(found)
        if found.note:
            typer.echo(f"note: {found.note}", err=True)


@app.command(help=TOKENIZER_HELP)
def tokenizer(
    to: Annotated[Path, typer.Option("--to", help="The folder to write.", show_default=False)],
    first: Annotated[
        list[str] | None,
        typer.Option("--from", help="Text files and folders.", show_default=False),
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="[FILE]", show_default=False)] = None,
    vocabulary: Annotated[
        int, typer.Option("--vocabulary", help="Number of ids, special tokens included.")
    ] = 8192,
) -> None:
    """Train a tokenizer (see TOKENIZER_HELP)."""
    with _errors_shown([], None):
        from flowrun.launcher.commands.tokenizer_folder import make_tokenizer

        made = make_tokenizer([*(first or []), *(more or [])], vocabulary, to)
        doing.clear()
        typer.echo(f"{to}: {made:,} ids; data.tokenizer={to} model.vocabulary={made} take it")


@app.command(help=BENCH_HELP)
def bench(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[suite=NAME] [suite.key=value] [key=value]…", show_default=False),
    ] = None,
    config_dir: ConfigDir = None,
) -> None:
    """Compare with torch's own layouts (see BENCH_HELP)."""
    given = overrides or []
    with _errors_shown(given, config_dir):
        from flowrun.launcher.bench.bench import bench as run_suite
        from flowrun.launcher.bench.foreseen.foresee import foresee
        from flowrun.launcher.bench.suite import Suite, load_suite
        from flowrun.launcher.terminal.console import wide_console

        suite, folder = load_suite(given, config_dir)
        if not isinstance(suite, Suite):
            if any(line.problem for line in foresee(suite, folder, wide_console(), config_dir)):
                raise typer.Exit(RUN_FAILED)
            return
        if suite.sweep:
            from flowrun.launcher.bench.sweep import sweep

            rows = sweep(suite, folder, wide_console(), config_dir)
            if any(row.problem for row in rows):
                raise typer.Exit(RUN_FAILED)
            return
        found = run_suite(suite, folder, wide_console(), config_dir)
        if any(line.problem or line.agree is False for line in found):
            raise typer.Exit(RUN_FAILED)


@app.command(help=CALIBRATE_HELP)
def calibrate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The profile to write.")] = Path(
        "profiles/hardware/mine.yaml"
    ),
    overrides: Overrides = None,
    config_dir: ConfigDir = None,
) -> None:
    """Write a profile of this machine (see CALIBRATE_HELP)."""
    given = overrides or []
    if "=" in str(file):  # FILE left out
        given, file = [str(file), *given], Path("profiles/hardware/mine.yaml")
    with _errors_shown(given, config_dir):
        from flowrun.launcher.commands import calibrate as story
        from flowrun.launcher.commands.calibrate_ops import show_ops, with_ops
        from flowrun.launcher.recipe.hardware_keys import load_shipped, of_file
        from flowrun.launcher.terminal.console import wide_console

        console = wide_console()
        recipe = _load(given, config_dir) if given else None
        if recipe is None or not file.exists():
            base = load_shipped("cpu")
            console.print("measuring this machine, which takes two to three minutes …", style="dim")
            found = story.calibrate(base, file.stem, story.THOROUGH, story.GROUPS)
            story.write(found.hardware, file)
            story.show(found, base, console)
        if recipe is not None:
            hardware = with_ops(of_file(file), [recipe])
            story.write(hardware, file)
            show_ops(hardware, console)
        typer.echo(f"{file}: {_usage(file)}")


def _usage(profile: Path) -> str:
    """Say how a recipe takes the profile."""
    folder = profile.absolute().parent
    if folder.name == "hardware" and profile.suffix == ".yaml":
        return f"--config-dir {profile.parent.parent} hardware={profile.stem}"
    return "recipes take it from FOLDER/hardware/NAME.yaml: --config-dir FOLDER hardware=NAME"


@app.command(help=RUNS_HELP)
def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER | RUN_DIR | A B]", show_default=False),
    ] = None,
    follow: Annotated[
        Path | None,
        typer.Option("--follow", metavar="RUN_DIR", help="Show its steps as they come."),
    ] = None,
) -> None:
    """List runs, compare two, follow one (see RUNS_HELP)."""
    with _errors_shown([], None):
        from flowrun.launcher.commands import list_runs as story
        from flowrun.launcher.terminal.console import wide_console

        story.show(folders or [], follow, wide_console())


@app.command(help=INIT_HELP)
def init(
    model: Annotated[str, typer.Argument(metavar="my_models.Net | FOLDER", show_default=False)],
    data: Annotated[
        str | None,
        typer.Option("--data", help="The data set's class; without it one in the model's module."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="The recipe; without it recipes/NAME.yaml.")
    ] = None,
) -> None:
    """Write a recipe for a model (see INIT_HELP)."""
    with _errors_shown([], None):
        from flowrun.launcher.commands.start.init_recipe import show_written, write_recipe
        from flowrun.launcher.terminal.console import wide_console

        show_written(write_recipe(model, data, to), wide_console())


@app.command(help=SCHEMA_HELP)
def schema(
    to: Annotated[Path, typer.Option("--to", help="The file.")] = Path("recipe.schema.json"),
) -> None:
    """Write the schema of recipes (see SCHEMA_HELP)."""
    with _errors_shown([], None):
        from flowrun.launcher.commands.start.json_schema import write_schema

        line = write_schema(to)
        typer.echo(f"{to} is written; as the first line of a recipe editors read:\n{line}")


@app.command(help=COMPLETION_HELP)
def completion() -> None:
    """Print a script for bash (see COMPLETION_HELP)."""
    from flowrun.launcher.commands.start.complete import BASH

    typer.echo(BASH, nl=False)


@app.command("import", help=IMPORT_HELP)
def import_config(
    file: Annotated[Path, typer.Argument(metavar="FILE", show_default=False)],
    to: Annotated[Path, typer.Option("--to", help="The recipe to write.")] = Path(
        "recipes/imported.yaml"
    ),
) -> None:
    """Write a recipe of a foreign file (see IMPORT_HELP)."""
    with _errors_shown([], None):
        from flowrun.launcher.commands.start.foreign_config import show_import, write_foreign
        from flowrun.launcher.terminal.console import wide_console

        show_import(write_foreign(file, to), to, wide_console())


@app.command()
def recipes() -> None:
    """List the recipes that there are, with a line each."""
    from rich.console import Console
    from rich.table import Table

    from flowrun.launcher.recipe.hydra_source import FOLDERS, describe, recipe_names

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, file in recipe_names().items():
        table.add_row(name, describe(file))
    console = Console()
    console.print(table)
    console.print(
        f"Run one with flowrun recipe=NAME; ./recipes and the folders in ${FOLDERS} add more.",
        style="dim",
    )


def _print_rows(rows: Sequence[Any]) -> None:
    """A table of dataclasses: their fields are the columns."""
    from rich.table import Table

    from flowrun.launcher.terminal.console import wide_console

    names = [field.name for field in fields(rows[0])] if rows else []
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name.replace("_", " "), no_wrap=name != names[-1])
    for row in rows:
        values = (getattr(row, name) for name in names)
        table.add_row(
            *(f"{value:.2e}" if isinstance(value, float) else str(value) for value in values)
        )
    wide_console().print(table)


def _load(overrides: list[str], config_dir: str | None) -> Any:
    with pause_collection():
        from flowrun.launcher.recipe.compose import load

    return load(overrides, config_dir)


@contextmanager
def _errors_shown(overrides: list[str], config_dir: str | None) -> Iterator[None]:
    """An error becomes its text and an exit status; Ctrl-C ends quietly."""
    try:
        yield
    except KeyboardInterrupt:
        doing.clear()
        typer.echo("stopped", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except SystemExit as ended:
        if by := getattr(ended, "by", ""):  # Preempted, which few commands import
            doing.clear()
            typer.echo(f"stopped by {by}", err=True)
        raise
    except Exception as error:
        if isinstance(error, typer.Exit) or os.environ.get(TRACEBACK) == "1":
            raise
        from flowrun.launcher.recipe.recipe_errors import explain

        status = RECIPE_WRONG if isinstance(error, FlowrunError) else RUN_FAILED
        if not isinstance(error, FlowrunError):
            from flowrun.launcher.launch.failure import own_fault

            error = own_fault(error)
        text = explain(error, overrides, config_dir)
        doing.clear()
        typer.echo(text, err=True)
        raise typer.Exit(RUN_FAILED if isinstance(error, RunError) else status) from None


if __name__ == "__main__":
    main()
