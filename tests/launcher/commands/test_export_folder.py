import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flowrun.engine.errors import RecipeError
from flowrun.launcher.commands.export import put_at
from flowrun.launcher.commands.export_folder import export_folder
from flowrun.launcher.commands.load_run import load_run
from flowrun.launcher.commands.write_text import open_writer
from flowrun.launcher.text.generate import Drawing
from flowrun.launcher.urls.object_store import ObjectStore
from flowrun.launcher.urls.url_cache import on_disk
from support.runs.saved_run import TINY, save_run
from support.runs.store_server import access, s3_server
from support.runs.workplace import End
from support.samples.small_tokenizer import save_tokenizer

TOKENS = torch.tensor([[1, 5, 200, 7, 0, 3]])
LLAMA = """\
defaults: [/data: text, /optim: adamw, /launch: local]
model:
  _target_: transformers.LlamaForCausalLM
  config: {_target_: transformers.LlamaConfig, vocab_size: 280, hidden_size: 16,
    intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2}
data: {length: 8, max_bytes: 20000, tokenizer: words}
task: {inputs: {input_ids: tokens}, loss: null}
"""
OUR_LLAMA = """\
defaults: [/data: text, /optim: adamw, /launch: local]
model: {_target_: flowrun.models.llama.Llama, vocabulary: 256, depth: 1, heads: 2, key_heads: 1,
  width: 16, inner: 16}
data: {length: 8, max_bytes: 20000}
"""
PAIRS = """\
defaults: [/optim: adamw, /launch: local]
model:
  _target_: flowrun.models.reference.WithReference
  model:
    _target_: transformers.LlamaForCausalLM
    config: {_target_: transformers.LlamaConfig, vocab_size: 280, hidden_size: 16,
      intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2}
data:
  _target_: flowrun.launcher.data.corpus.preferences.Preferences
  chosen: {_target_: flowrun.launcher.data.corpus.text.Text, length: 8, max_bytes: 20000,
    tokenizer: words}
task: {loss: {_target_: flowrun.models.losses.preference}}
"""


@pytest.fixture
def run(workplace: Path) -> Path:
    """A run of flowrun's GPT on bytes."""
    return save_run(workplace / "run")


def llama_run(folder: Path, text: str = LLAMA) -> Path:
    """A run of a Llama of transformers on a tokenizer whose text ends with id 0."""
    (folder / "llama.yaml").write_text(text)
    save_tokenizer(folder / "words")
    return save_run(folder / "run", "recipe=llama.yaml")


@pytest.fixture
def llama(workplace: Path) -> Path:
    return llama_run(workplace)


@torch.no_grad()
def test_from_pretrained_gives_the_logits_of_the_run(run: Path) -> None:
    written = export_folder(run)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(written.folder)
    ours = load_run(run).model
    assert (theirs(TOKENS).logits - ours(TOKENS)).abs().max() < 1e-5
    assert theirs.generation_config.eos_token_id is None


def test_its_tokenizer_has_bytes(run: Path) -> None:
    export_folder(run)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "hf")
    every = bytes(range(128)).decode() + "é日本"
    assert tokenizer(every).input_ids == list(every.encode())
    assert tokenizer.decode(list(every.encode()), clean_up_tokenization_spaces=False) == every


def test_a_run_and_its_folder_write_the_same(run: Path) -> None:
    export_folder(run)
    short = Drawing(tokens=4, temperature=0)
    writers = [open_writer(folder) for folder in (run, run / "hf")]
    texts = ["".join(writer.continue_text("def ", short)) for writer in writers]
    assert texts[0] == texts[1] != ""


def test_a_model_beside_its_reference_is_written_alone(workplace: Path) -> None:
    folder = llama_run(workplace, PAIRS)
    (workplace / "words").rename(workplace / "gone")
    recipe = (folder / "recipe.yaml").read_text()
    moved = recipe.replace("WithReference\n", "WithReference\n  file: gone.safetensors\n")
    (folder / "recipe.yaml").write_text(moved)
    export_folder(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
    trained = load_run(folder).model.get_submodule("model")
    assert torch.equal(theirs(TOKENS).logits, trained(TOKENS).logits)
    writers = [open_writer(each) for each in (folder, folder / "hf")]
    texts = ["".join(each.continue_text("the cat", Drawing(tokens=6))) for each in writers]
    assert texts[0] == texts[1] != ""


def test_weights_come_in_shards_with_an_index(run: Path) -> None:
    export_folder(run, shard="10KB")
    index = json.loads((run / "hf" / "model.safetensors.index.json").read_text())
    assert len({*index["weight_map"].values()}) > 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run / "hf")
    assert torch.equal(theirs.lm_head.weight, load_run(run).model.head.weight)


def test_weights_may_be_narrower(run: Path) -> None:
    export_folder(run, dtype="bf16")
    found = load_file(run / "hf" / "model.safetensors")
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert json.loads((run / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


@torch.no_grad()
def test_a_model_of_transformers_has_its_own_config(llama: Path, workplace: Path) -> None:
    written = export_folder(llama, workplace / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(written.folder)
    assert torch.equal(theirs(TOKENS).logits, load_run(llama).model(TOKENS).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(written.folder)
    assert tokenizer.decode(tokenizer("the cat").input_ids) == "the cat"


def ids_in(folder: Path, file: str) -> list[int | None]:
    """The ids that begin and end a text, by a file of a folder."""
    said = json.loads((folder / file).read_text())
    return [said.get("bos_token_id"), said.get("eos_token_id")]


def test_a_text_ends_as_the_tokenizer_says(llama: Path) -> None:
    """The class of the config has 1 and 2, which are ids of words."""
    folder = export_folder(llama).folder
    for file in ("config.json", "generation_config.json"):
        assert ids_in(folder, file) == [None, 0]


def test_more_ends_than_the_tokenizer_names_stay(workplace: Path) -> None:
    ends = LLAMA.replace("num_attention_heads", "eos_token_id: [0, 7], num_attention_heads")
    folder = export_folder(llama_run(workplace, ends)).folder
    assert ids_in(folder, "generation_config.json") == [None, [0, 7]]


def test_a_tokenizer_that_is_gone_is_named_or_replaced(llama: Path, workplace: Path) -> None:
    (workplace / "words").rename(workplace / "moved")
    (workplace / "run" / "tokenizer").rename(workplace / "copy")
    with pytest.raises(RecipeError, match="there is no tokenizer at words") as refused:
        export_folder(llama)
    assert "--tokenizer FOLDER names one" in str(refused.value)
    folder = export_folder(llama, tokenizer="moved").folder
    assert (folder / "tokenizer.json").exists()


def test_the_tokenizer_that_a_run_was_trained_with_goes_along(llama: Path, workplace: Path) -> None:
    (workplace / "words").rename(workplace / "gone")
    moved = llama.rename(workplace / "moved")
    assert export_folder(moved).folder == moved / "hf"
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (moved / "tokenizer" / file).read_bytes() == (workplace / "gone" / file).read_bytes()
    vocabularies = [
        transformers.AutoTokenizer.from_pretrained(str(folder)).get_vocab()
        for folder in (workplace / "gone", moved / "hf")
    ]
    assert vocabularies[0] == vocabularies[1]


def test_a_model_that_is_there_is_not_overwritten(run: Path, workplace: Path) -> None:
    export_folder(run)
    export_folder(run)  # the run's own folder
    export_folder(run, workplace / "out")
    with pytest.raises(RecipeError, match="it holds a model"):
        export_folder(run, workplace / "out")


def test_weights_kept_in_bf16_stay_so(workplace: Path) -> None:
    narrow = save_run(workplace / "narrow", *TINY, "precision.param_dtype=bf16")
    found = load_file(export_folder(narrow).folder / "model.safetensors")
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    kept = "precision.keep_fp32=['*norm*']"
    some = save_run(workplace / "some", *TINY, "precision.param_dtype=bf16", kept)
    found = load_file(export_folder(some).folder / "model.safetensors")
    assert {value.dtype for value in found.values()} == {torch.float32}


def test_a_llama_has_the_positions_that_it_was_trained_with(workplace: Path) -> None:
    (workplace / "ours.yaml").write_text(OUR_LLAMA)
    folder = export_folder(save_run(workplace / "run", "recipe=ours.yaml")).folder
    said = json.loads((folder / "config.json").read_text())
    assert said["max_position_embeddings"] == 8


@torch.no_grad()
def test_adapters_are_merged(workplace: Path) -> None:
    run = llama_run(workplace, LLAMA + "adapters: {rank: 2, modules: ['*.q_proj']}\n")
    file = run / "weights.safetensors"
    trained = {name: value + value.std() / 9 + 0.1 for name, value in load_file(file).items()}
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(trained, file, metadata)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export_folder(run).folder)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    assert (theirs(TOKENS).logits - load_run(run).model(TOKENS).logits).abs().max() < 1e-5
    save_file(trained, file, {"format": "pt", "steps": "3"})  # as an earlier release wrote it
    with pytest.raises(RecipeError, match="do not say how these are merged"):
        export_folder(run)


def test_the_folder_starts_another_run(run: Path, workplace: Path) -> None:
    export_folder(run)
    other = save_run(workplace / "other", *TINY, "train.seed=5", f"model.weights={run / 'hf'}")
    ours, theirs = (load_run(folder).model.state_dict() for folder in (run, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


WRITTEN = {
    "--format hf --to out/": r"out/config.json\n.*\nout/model.*: \d+\.\d kB, 15 tensors, step 3.*",
    "--to out/": r"out/weights.safetensors: \d+\.\d kB, 13 tensors, step 3\n",
}


@pytest.mark.parametrize(("words", "said"), WRITTEN.items(), ids=WRITTEN)
@pytest.mark.parametrize("is_there", [False, True])
def test_the_command_names_what_it_wrote(
    run: Path, words: str, said: str, is_there: bool, end: End
) -> None:
    if is_there:
        Path("out").mkdir()
        words = words.removesuffix("/")
    status, out, err = end("export", str(run), *words.split())
    assert (status, err) == (0, "") and re.fullmatch(said, out, re.DOTALL)


REFUSED = {
    "--format onnx": "there is safetensors or hf.",
    "--dtype bf16": "one file of weights has the dtypes of the training.",
    "--format hf --dtype int4": "there is fp32, bf16 or fp16.",
    "--tokenizer words": "one file of weights has no tokenizer.",
    "--format hf --to run/recipe.yaml": "this is a file, no folder.",
}


@pytest.mark.parametrize(("words", "problem"), REFUSED.items(), ids=REFUSED)
def test_other_options_are_refused(run: Path, words: str, problem: str, end: End) -> None:
    status, _, err = end("export", str(run), *words.split())
    assert (status, problem in err) == (2, True)


def test_a_model_that_transformers_has_not_is_refused(workplace: Path) -> None:
    run = save_run(workplace / "run", "recipe=mlp_hybrid")
    with pytest.raises(RecipeError, match="no class that computes what MLP does"):
        export_folder(run)


def test_a_folder_goes_to_a_url_with_its_config_last(
    run: Path, end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    put = ObjectStore.put

    def note(store: ObjectStore, name: str, file: Path) -> None:
        names.append(name)
        put(store, name, file)

    monkeypatch.setattr(ObjectStore, "put", note)
    to, file = "s3://bucket/models/gpt", "s3://bucket/models/gpt.safetensors"
    with s3_server() as port:
        for name, value in access(port).items():
            monkeypatch.setenv(name, value)
        status, out, err = end("export", str(run), "--format", "hf", "--to", to)
        assert (status, err) == (0, "") and f"{to}/model.safetensors: " in out
        assert names[-1] == "config.json" and "tokenizer.json" in names
        theirs = transformers.AutoModelForCausalLM.from_pretrained(on_disk(to, "x"))
        assert (theirs(TOKENS).logits - load_run(run).model(TOKENS)).abs().max() < 1e-5
        status, _, err = end("export", str(run), "--format", "hf", "--to", f"{to}/")
        assert status == 2 and "it holds a model that would be overwritten." in err
        status, out, _ = end("export", str(run), "--to", file)
        assert status == 0 and out.startswith(f"{file}: ") and names[-1] == "gpt.safetensors"
        status, _, err = end("export", str(run), "--to", "s3://none/gpt.safetensors")
        assert status == 2 and "The specified bucket does not exist" in err


def test_an_index_goes_after_its_shards_and_before_the_config(tmp_path: Path) -> None:
    store = ObjectStore.open(f"memory://{tmp_path}/there", "x")
    made = ["model-1.safetensors", "config.json", "model.safetensors.index.json", "vocab.json"]
    with put_at(store.url, True) as folder:
        for name in made:
            Path(str(folder), name).write_text(name)
    kept = store.find()
    order = sorted(kept, key=lambda name: str(kept[name]["created"]))
    assert {*order[:2]} == {made[0], made[3]} and order[2:] == [made[2], made[1]]
