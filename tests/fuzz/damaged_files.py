"""Damaged files: a seed -> a place of files of which one is damaged, and a command that reads it.

Kinds: rows and text that a data set reads, tokenizers, weights, folders of Hugging Face's, folders
of runs, and the cache of tokenised text.  A case is a function of its seed alone.
"""

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fuzz.mutations import ODD_KEYS, TEXT_CHANGES, change_tree

MAKE = "make"  # in place of a command: make the model and the data of a recipe
RECIPE = """\
defaults: [/data: {data}, /optim: adamw, /launch: virtual]
model:
  {{_target_: flowrun.models.gpt.GPT, vocabulary: 280, context: 64, depth: 1, heads: 2, width: 16}}
data: {{{keys}, tokenizer: words}}
task:
  inputs: {{tokens_BT: tokens}}
  loss: {{_target_: flowrun.models.losses.cross_entropy, target: targets}}
placement: {{axes: {{data: 1}}}}
engine: {{check_capture: false, cache: false}}
{adapters}
eval: {{fraction: 0.25, batches: 1, sample: false}}
train: {{batch_size: 4, micro_batches: 1, steps: 2, save_every: 1}}
"""
DATA = {
    "chat": "path: chat.jsonl, length: 64, long: cut",
    "instructions": "path: instructions.jsonl, length: 64, long: cut",
    "text_rows": "path: rows.parquet, length: 64",
    "text": "path: text, length: 64",
}
WEIGHTS = ("weights.safetensors", "weights.bin", "llama")
RUN_COMMANDS = (
    ("export", "RUN"),
    ("export", "RUN", "--step", "1"),
    ("export", "RUN", "--format", "hf"),
    ("export", "RUN", "--adapters"),
    ("sample", "RUN", "--tokens", "2"),
    ("sample", "RUN/checkpoints/step_00000001", "--tokens", "2"),
    ("eval", "RUN"),
    ("eval", "RUN", "--step", "1"),
    ("runs", "."),
    ("runs", "RUN", "adapted"),
)


@dataclass(frozen=True)
class DamagedCase:
    """A case is a file of a place, a change of its bytes, and the command that reads it then.

    file: below the place.  change: of it.
    """

    seed: int
    kind: str
    words: tuple[str, ...]
    file: str
    change: Callable[[Path], None]


# ---- the place -----------------------------------------------------------------------------------


def make_place(folder: Path) -> None:
    """Make whole files in the working directory, which is `folder`."""
    import pyarrow
    import torch
    from pyarrow import parquet
    from safetensors.torch import save_file

    from flowrun.launcher.model.build import instantiate_model
    from flowrun.launcher.recipe.compose import load
    from flowrun.launcher.run import run
    from support.nets.small_llama import small_llama
    from support.samples.row_files import write_rows
    from support.samples.small_tokenizer import save_tokenizer

    save_tokenizer(folder / "words")
    said = [f"the cat {'sat ' * (k % 5)}on the mat" for k in range(40)]
    turns = [
        [{"role": "user", "content": "where?"}, {"role": "assistant", "content": text}]
        for text in said
    ]
    write_rows(folder, *({"messages": each} for each in turns), name="chat.jsonl")
    asked = ({"prompt": "?", "answer": text} for text in said)
    write_rows(folder, *asked, name="instructions.jsonl")
    parquet.write_table(pyarrow.table({"text": said}), folder / "rows.parquet")
    (folder / "text").write_text("\n".join(said))
    for name, keys in DATA.items():
        adapters = "adapters: {rank: 2, modules: ['blocks.*.attn.qkv']}" if name == "chat" else ""
        recipe = RECIPE.format(data=name, keys=keys, adapters=adapters)
        (folder / f"{name}.yaml").write_text(recipe)
    for name, kind in (("plain", "text"), ("adapted", "chat")):
        run(load([f"recipe={kind}.yaml"]), folder / name)
    state = instantiate_model(load(["recipe=text.yaml"])).state_dict()
    save_file(state, folder / "weights.safetensors")
    torch.save(state, folder / "weights.bin")
    llama = small_llama(vocab_size=280, num_hidden_layers=2, max_position_embeddings=32)
    llama.save_pretrained(folder / "llama", max_shard_size="20KB")
    save_tokenizer(folder / "llama")


# ---- cases ---------------------------------------------------------------------------------------


def make_damaged_case(seed: int, place: Path) -> DamagedCase:
    """Make the case of a seed.  place: as make_place has left it."""
    chance = random.Random(seed)
    kind = chance.choice(tuple(KINDS))
    words, root = KINDS[kind](chance, place)
    inside = sorted(file for file in root.rglob("*") if file.is_file()) if root.is_dir() else [root]
    file = chance.choice(inside)
    return DamagedCase(
        seed, kind, words, str(file.relative_to(place)), lambda path: damage(chance, path)
    )


def _data(chance: random.Random, place: Path) -> tuple[tuple[str, ...], Path]:
    name = chance.choice(tuple(DATA))
    file = DATA[name].partition("path: ")[2].partition(",")[0]
    return (MAKE, f"recipe={name}.yaml", *_pack(chance, name)), place / file


def _pack(chance: random.Random, name: str) -> tuple[str, ...]:
    return ("data.pack=true",) if name != "text" and chance.random() < 0.3 else ()


def _tokenizer(chance: random.Random, place: Path) -> tuple[tuple[str, ...], Path]:
    return (MAKE, f"recipe={chance.choice(tuple(DATA))}.yaml"), place / "words"


def _weights(chance: random.Random, place: Path) -> tuple[tuple[str, ...], Path]:
    name = chance.choice(WEIGHTS)
    llama = "model={_target_: transformers.AutoModelForCausalLM.from_pretrained, "
    llama += "pretrained_model_name_or_path: llama}"
    if name == "llama" and chance.random() < 0.5:
        keys = (llama, "task.inputs={input_ids: tokens}")
        return (MAKE, "recipe=text.yaml", *keys), place / name
    return (MAKE, "recipe=text.yaml", f"model.weights={name}"), place / name


def _folder(chance: random.Random, place: Path) -> tuple[tuple[str, ...], Path]:
    chat = ("--chat",) if chance.random() < 0.3 else ()
    return ("sample", "llama", "--prompt", "the", "--tokens", "2", *chat), place / "llama"


def _run(chance: random.Random, place: Path) -> tuple[tuple[str, ...], Path]:
    run = chance.choice(("plain", "adapted"))
    words = chance.choice(RUN_COMMANDS)
    return tuple(word.replace("RUN", run) for word in words), place / run


def _cache(chance: random.Random, place: Path) -> tuple[tuple[str, ...], Path]:
    return (MAKE, f"recipe={chance.choice(('text', 'chat'))}.yaml"), place / "cache" / "flowrun"


KINDS: dict[str, Callable[[random.Random, Path], tuple[tuple[str, ...], Path]]] = {
    "data": _data,
    "tokenizer": _tokenizer,
    "weights": _weights,
    "folder": _folder,
    "run": _run,
    "cache": _cache,
}


# ---- damages -------------------------------------------------------------------------------------


def damage(chance: random.Random, file: Path) -> None:
    ways: list[Callable[[random.Random, Path], None]] = [_bytes, _bytes, _bytes, _entry]
    if file.suffix in (".json", ".jsonl"):
        ways += [_json] * 5
    if file.suffix == ".safetensors":
        ways += [_header] * 4
    chance.choice(ways)(chance, file)


def _bytes(chance: random.Random, file: Path) -> None:
    content = file.read_bytes()
    for _ in range(chance.choice((1, 1, 2, 3))):
        content = chance.choice(TEXT_CHANGES)(chance, content)
    file.write_bytes(content)


def _entry(chance: random.Random, file: Path) -> None:
    """The name stands for something else: nothing, no bytes, a folder, a link, another file."""
    way = chance.randrange(6)
    if way == 0:
        file.write_bytes(b"")
    elif way == 1:
        other = chance.choice(sorted(each for each in file.parent.iterdir() if each.is_file()))
        file.write_bytes(other.read_bytes())
    else:
        file.unlink()
    if way == 3:
        file.mkdir()
    elif way == 4:
        file.symlink_to("nowhere")
    elif way == 5:
        file.symlink_to(file.name)


def _json(chance: random.Random, file: Path) -> None:
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    at = chance.randrange(len(lines))
    lines[at] = _change_json(chance, lines[at])
    file.write_text("\n".join(lines))


def _header(chance: random.Random, file: Path) -> None:
    """Change the JSON in front of tensors, with its length."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    text = _change_json(chance, content[8 : 8 + size].decode()).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def _change_json(chance: random.Random, text: str) -> str:
    tree = {"": copy.deepcopy(json.loads(text))}
    for _ in range(chance.choice((1, 1, 2))):
        change_tree(chance, tree)
    return json.dumps(tree.get("", chance.choice(ODD_KEYS)), default=str)


def copy_place(place: Path, to: Path) -> None:
    """Copy the whole files, linked by hard links but the one that a case writes to."""
    shutil.copytree(place, to, copy_function=os.link)


def damage_case(case: DamagedCase, place: Path, to: Path) -> None:
    """Make the place of a case: a copy of `place` with the file damaged."""
    copy_place(place, to)
    own = to / case.file
    own.unlink()
    shutil.copyfile(place / case.file, own)
    case.change(own)
