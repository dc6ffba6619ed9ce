"""`flowrun eval` of models of text gives the run's own numbers, whatever data they were trained on.

All: pytest tests/launcher/commands/test_evaluate_text.py --thorough
"""

import json
from itertools import product
from pathlib import Path

import pytest

from flowrun.launcher.commands.evaluate import evaluate
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.run import run
from support.nets.small_llama import small_llama
from support.samples.small_tokenizer import save_tokenizer

DATA = {
    "chat": {
        "messages": [
            {"role": "user", "content": "the cat {n}?"},
            {"role": "assistant", "content": "sat on the mat {n}"},
        ]
    },
    "instructions": {"prompt": "the dog {n}?", "answer": "on the log {n}"},
    "text_rows": {"text": "the dog and the cat {n} sat on the mat"},
}
FAMILIES = {
    "llama": (
        "model: {_target_: flowrun.models.llama.Llama, vocabulary: 320, depth: 1, heads: 2, "
        "key_heads: 1, width: 16, inner: 24}\n"
        "task: {inputs: {tokens_BT: tokens}, "
    ),
    "transformers": (
        "model: {_target_: transformers.AutoModelForCausalLM.from_pretrained, "
        "pretrained_model_name_or_path: base}\n"
        "task: {inputs: {input_ids: tokens}, "
    ),
}
LORA = {"llama": '["*.attn.q", "*.attn.v"]', "transformers": '["*.q_proj", "*.v_proj"]'}
RECIPE = """\
defaults: [/data: {data}, /optim: adamw, /launch: virtual]
{family}loss: {{_target_: flowrun.models.losses.cross_entropy, target: targets}}}}
data: {{path: rows.jsonl, tokenizer: words, length: 64, pack: {pack}}}
adapters: {{modules: {modules}, rank: 2, alpha: 4}}
placement: {{axes: {{data: 2}}}}
engine: {{check_capture: false, cache: false}}
optim: {{lr: 0.01, groups: {{}}}}
eval: {{fraction: 0.5, batches: 2}}
train: {{batch_size: 4, micro_batches: 2, steps: 2}}
"""
CASES = [*product(DATA, (False, True), (False, True), FAMILIES)]
QUICK = {("chat", True, True, "transformers"), ("text_rows", True, False, "llama")}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a model of transformers, for all tests."""
    folder = tmp_path_factory.mktemp("shared")
    save_tokenizer(folder / "words")
    small_llama().save_pretrained(folder / "base")
    return folder


@pytest.mark.parametrize(
    ("data", "pack", "adapters", "family"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.thorough, id="-".join(
            (case[0], "packed" * case[1] or "alone", "lora" * case[2] or "full", case[3])
        ))
        for case in CASES
    ],
)  # fmt: skip
def test_the_numbers_are_those_of_the_run(
    workplace: Path, shared: Path, data: str, pack: bool, adapters: bool, family: str
) -> None:
    for name in ("words", "base"):
        (workplace / name).symlink_to(shared / name)
    row = json.dumps(DATA[data])
    (workplace / "rows.jsonl").write_text(
        "".join(row.replace("{n}", "so " * (k % 5)) + "\n" for k in range(160))
    )
    recipe = RECIPE.format(
        data=data,
        family=FAMILIES[family],
        pack=str(pack).lower(),
        modules=LORA[family] if adapters else "[]",
    )
    (workplace / "case.yaml").write_text(recipe)
    run(load(["recipe=case.yaml"]), workplace / "run")
    own = json.loads((workplace / "run" / "report.json").read_text())["validation"]
    assert evaluate(workplace / "run").results == pytest.approx(own, rel=1e-6)
