"""Commands for what was trained: export, sample, eval; and tokenizer, for what will be."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowrun.launcher.command_line import app as shared
from flowrun.launcher.command_line.app import app
from flowrun.launcher.terminal import doing

if TYPE_CHECKING:
    from flowrun.launcher.text.prompts import Prompt, WrittenText


@app.command()
def export(
    run_folder: shared.RunFolder,
    step: shared.OfStep = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="The file, a folder (it ends with /) or a URL; without it in the run's folder.",
        ),
    ] = None,
    best: shared.Best = False,
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
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", help="With --format hf: a folder or file, in place of the run's."
        ),
    ] = None,
) -> None:
    """Write the weights of a run, from any layout.

    One safetensors file has the names of the model's state_dict: plain torch and
    transformers load it, and so does model.weights of another recipe.  Adapters
    are merged into the weights, or written alone.

      flowrun export outputs/2026-01-31/12-00-00_gpt_tiny --to gpt.safetensors
      flowrun export RUN_DIR --step 200
      flowrun export RUN_DIR --adapters

    --format hf writes a folder that transformers' from_pretrained loads, with
    config and tokenizer: of its own models, and of flowrun's GPT, Llama and BERT.

      flowrun export RUN_DIR --format hf --to my_model/ --dtype bf16
      flowrun export RUN_DIR --format hf --to s3://bucket/my_model
    """
    with shared.open_run(run_folder, step=step, best=best) as folder:
        from flowrun.launcher.commands.export import check_format, describe_file, put_at
        from flowrun.launcher.commands.export import export as export_weights

        check_format(format, dtype, adapters, tokenizer)
        with put_at(to, adapters or format == "hf") as target:
            if format == "hf":
                from flowrun.launcher.commands.export_folder import export_folder

                place = Path(target) if target else None
                written = export_folder(
                    folder, place, step=step, best=best, dtype=dtype, tokenizer=tokenizer
                )
                said = "\n".join(written.lines())
            else:
                said = describe_file(export_weights(folder, step, target, best, adapters))
        typer.echo(said.replace(str(target).rstrip("/"), str(to).rstrip("/")))


@app.command()
def sample(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help="Folder of a run, of a checkpoint, or of Hugging Face's; or a run's URL.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="A text to continue.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="A file: lines, or jsonl with `prompt`.")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="A prompt is a question, by the chat template; without one, each line typed is.",
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
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw from the likeliest that have P together.")
    ] = 1.0,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the random numbers of each text.")] = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", help="A folder or file, or the word bytes, where the source names none."
        ),
    ] = None,
    step: shared.OfStep = None,
    best: shared.Best = False,
    to: Annotated[
        Path | None, typer.Option("--to", help="A file for the texts: a line of JSON each.")
    ] = None,
    form: shared.AsFormat = shared.Format.text,
) -> None:
    """Write text with a model that was trained on it.

    FOLDER is that of a run, of one of its checkpoints, or a folder of Hugging
    Face's.  A run's ids are bytes, or those of its data.tokenizer; of other ids,
    --tokenizer says what they are.

      flowrun sample outputs/2026-01-31/12-00-00_gpt_tiny --prompt "def "
      flowrun sample RUN_DIR --step 200 --temperature 0 --tokens 40
      flowrun sample path/to/llama --prompt "Once upon a time" --top-p 0.9
      flowrun sample path/to/llama --chat
      flowrun sample RUN_DIR --prompts prompts.jsonl --stop "def " --to out.jsonl
    """
    doing.doing("reading the model")
    with shared.open_run(source, step=step, best=best) as folder:
        from flowrun.launcher.commands.write_text import open_writer
        from flowrun.launcher.text.generate import Drawing
        from flowrun.launcher.text.prompts import collect_prompts

        stops = tuple(stop or ())
        drawing = Drawing(
            tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stops=stops
        )
        as_json = to is not None or form is shared.Format.json
        wanted = collect_prompts(prompt or (), prompts, chat, as_json)
        writer = open_writer(folder, step, best, tokenizer, _print_note)
        doing.clear()
        if as_json or prompts or len(wanted) > 1:
            _print_texts(writer.continue_all(wanted, drawing, chat), as_json, to, chat)
        elif chat:
            for answer in writer.answer(_read_questions(wanted), drawing):
                _print_pieces(answer)
        else:
            pieces = writer.continue_text(wanted[0].text, drawing)
            _print_pieces(chain([wanted[0].text], pieces))


def _print_note(text: str) -> None:
    typer.echo(f"note: {text}", err=True)


def _read_questions(given: Sequence[Prompt]) -> Iterator[str]:
    """Yield given questions, or else lines of the standard input, until its end, and show those
    that nobody types.
    """
    typed = not given and sys.stdin.isatty()
    if typed:
        typer.echo("> ", nl=False)
    for line in [prompt.text for prompt in given] or iter(sys.stdin.readline, ""):
        if question := line.strip():
            if not typed:
                _print_pieces([f"> {question}"])
            yield question
        if typed:
            typer.echo("> ", nl=False)


def _print_pieces(pieces: Iterable[str]) -> None:
    """Print a text as it is made."""
    from flowrun.launcher.terminal.console import printable

    for piece in pieces:
        typer.echo(printable(piece), nl=False)
    typer.echo()


def _print_texts(texts: Iterable[WrittenText], as_json: bool, to: Path | None, chat: bool) -> None:
    """Print texts, or write them to a file.  as_json: as lines of JSON.  chat: are answers."""
    from flowrun.launcher.recipe.recipe_errors import CommandLineError
    from flowrun.launcher.terminal.as_json import to_json
    from flowrun.launcher.terminal.console import printable

    if to and (to.is_dir() or not to.parent.is_dir()):
        raise CommandLineError(f"--to {to}", "no file can be written there.")
    number = 0
    with to.open("w", encoding="utf-8") if to else nullcontext(sys.stdout) as file:
        for each in texts:
            number += 1
            opening = f"> {each.prompt}\n" if chat else each.prompt
            line = to_json(each) if as_json else printable(f"{opening}{each.text}\n")
            print(line, file=file, flush=True)
    if to:
        typer.echo(f"{to}: {number:,} texts")


@app.command("eval")
def evaluate(
    run_folder: shared.RunFolder,
    overrides: shared.KeyChanges = None,
    step: shared.OfStep = None,
    best: shared.Best = False,
    config_dir: shared.ConfigDir = None,
    form: shared.AsFormat = shared.Format.text,
) -> None:
    """Evaluate a run on its held-out samples, without training.

    The loss and the metrics of its recipe, by plain torch on one process: with
    the newest weights, or those of a checkpoint.  Keys of the recipe may be
    changed: more samples, other data, other metrics.

      flowrun eval outputs/2026-01-31/12-00-00_gpt_tiny
      flowrun eval RUN_DIR --step 200 eval.batches=100
      flowrun eval RUN_DIR data.path=other.txt eval.fraction=0.9
    """
    given = overrides or []
    doing.doing("reading the model")
    with shared.open_run(run_folder, given, config_dir, step, best) as folder:
        from flowrun.launcher.commands.evaluate import evaluate as evaluate_run

        found = evaluate_run(folder, given, step=step, best=best, config_dir=config_dir)
        shared.print_found(found, form)
        for note in found.notes:
            typer.echo(f"note: {note}", err=True)


@app.command()
def tokenizer(
    to: Annotated[Path, typer.Option("--to", help="The folder to write.", show_default=False)],
    first: Annotated[
        list[str] | None, typer.Option("--from", help="Text files and folders.", show_default=False)
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="[FILE]", show_default=False)] = None,
    vocabulary: Annotated[
        int, typer.Option("--vocabulary", help="Number of ids, special tokens included.")
    ] = 8192,
) -> None:
    """Train a byte-level BPE tokenizer on text files.

    --to is the folder that it writes, which data.tokenizer takes, and
    AutoTokenizer.from_pretrained of transformers: with an end-of-text token and a
    chat template.  Without --from it reads the source of Python's standard
    library, as data=text does.

      flowrun tokenizer --from corpus/ notes.txt --vocabulary 8192 --to bpe/
      flowrun recipe=gpt_hybrid data.tokenizer=bpe/ model.vocabulary=8192
    """
    with shared.show_errors([], None):
        from flowrun.launcher.commands.tokenizer_folder import make_tokenizer

        made = make_tokenizer([*(first or []), *(more or [])], vocabulary, to)
        doing.clear()
        fewer = f", for the text has not {vocabulary:,}" if made < vocabulary else ""
        typer.echo(
            f"{to}: {made:,} ids{fewer}; data.tokenizer={to} model.vocabulary={made} take it"
        )
