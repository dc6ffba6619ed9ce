import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from flowrun.engine.lowering.idle_axes import IdleAxis
from flowrun.launcher.job.job import Job
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.report import notes as module
from flowrun.launcher.report.notes import notes
from flowrun.launcher.report.show_plan import plan_report
from flowrun.launcher.run import run
from flowrun.launcher.terminal.console import wide_console
from support.runs.command import Command, run_folder
from support.samples.small_tokenizer import save_tokenizer

MLP = "recipe=mlp_data_parallel"  # data 2, no pins
UNPINNED = "axis other divides nothing: its 2 ranks do the same work; pin with sbp"


@cache
def job(*changes: str) -> Job:
    return Job(load([*changes, "launch=virtual"]), values=False)


def about(words: str, *changes: str) -> list[str]:
    return [note for note in notes(job(*changes)) if words in note]


# ---- axes ----------------------------------------------------------------------------------------


def test_a_model_of_transformers_is_pointed_to_its_own_plan() -> None:
    axis = IdleAxis("tensor", 2, (0,), ())
    llama = {"_target_": "transformers.LlamaForCausalLM"}
    recipe = replace(load([MLP]), model=llama)
    assert "write sbp.from_model=tensor for the plan" in module._instead(axis, recipe)


@pytest.mark.parametrize(
    "changes",
    [
        ["view=mirrored"],
        ["placement.axes={other: 2}", "sbp.hidden.weight.other=S0"],
        ["placement.axes={other: 2}", "zero={axis: other, stage: 1}"],
        ["placement.axes.other=1"],
    ],
    ids=["mirrored", "pinned", "ZeRO", "one rank"],
)
def test_an_axis_that_divides_samples_weights_or_their_state_is_not(changes: list[str]) -> None:
    assert not about("divides nothing", MLP, *changes)


def test_an_axis_that_a_search_leaves_whole_says_so() -> None:
    (note, *_) = about("divides nothing", MLP, "parallel=auto", "train.batch_size=2")
    assert "do the same work, which parallel=auto foresees to be fastest" in note


def test_an_axis_that_divides_some_stages_names_the_others() -> None:
    axes = ["placement.axes={data: 1, other: 2}", "sbp.output.weight.other=S0"]
    stages = "placement.stages=[{modules: [hidden]}, {modules: [output]}]"
    (note,) = about("divides nothing", MLP, *axes, stages)
    assert note.startswith("axis other divides nothing on stage 0: its 2 ranks")


def test_notes_are_in_the_plan_and_in_the_runs_folder(tmp_path: Path) -> None:
    changes = ["placement.axes.other=2", "train.steps=1", "eval.batches=0"]
    recipe = load([MLP, *changes, "launch=virtual"])
    run(recipe, tmp_path / "out")
    assert f"\nnote: {UNPINNED}" in (tmp_path / "out" / "plan.txt").read_text()
    console = wide_console()
    with console.capture() as shown:
        console.print(plan_report(job(MLP, "placement.axes.other=2")))
    assert f"note: {UNPINNED}" in " ".join(shown.get().split())


# ---- cores ---------------------------------------------------------------------------------------


def test_more_ranks_than_cores_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    words = "share 2 cores of this host"

    def found(*changes: str) -> list[str]:
        made = Job(load([MLP, *changes]), values=False)
        return [note for note in notes(made) if words in note]

    assert found("placement.axes.data=4") == [f"4 ranks {words}"]
    assert found("launch.threads=2") == [f"2 ranks of 2 threads {words}"]
    assert not found()
    assert not found("placement.axes.data=4", "launch=virtual")
    assert not found("placement.axes.data=4", "hardware=dgx_a100")


# ---- samples -------------------------------------------------------------------------------------

SLOW = """
from flowrun.launcher.data.digits import Digits
from flowrun.launcher.data.steps import Step, StepwiseDataset

class AtOnce(Digits):
    sample_seconds = 0.1

class InSteps(StepwiseDataset):
    def __init__(self):
        self.digits = Digits()
        self.steps = (Step("read", 1e-6), Step("decode", 0.1))

    def __len__(self):
        return len(self.digits)

    def read(self, index):
        return index

    def decode(self, index):
        return self.digits[index]
"""


@pytest.mark.parametrize(
    ("name", "what"), [("AtOnce", "Reading"), ("InSteps", "The step 'decode' of the data set")]
)
def test_samples_that_bound_the_step_are_noted(name: str, what: str, workplace: Path) -> None:
    """Of two ranks with 16 samples each."""
    (workplace / "slow_samples.py").write_text(SLOW)
    slow = f"data={{_target_: slow_samples.{name}}}"
    (note,) = about("samples bound the step", MLP, "hardware=h100", "train.batch_size=32", slow)
    assert note.startswith("samples bound the step: 1.60 s, ")
    assert f"{what} takes a rank 1.60 s of one core" in note
    assert "cut this into several steps" in note


def test_samples_that_are_ready_in_time_are_not_noted() -> None:
    assert not about("samples bound", MLP)


def test_samples_too_few_to_hold_any_out_are_noted() -> None:
    (note,) = about("no validation", MLP, "eval.fraction=0.0001")
    assert note == "no validation: 0% of 1797 samples is less than one sample (eval.fraction)"
    assert not about("no validation", MLP, "eval.batches=0")


# ---- keys ----------------------------------------------------------------------------------------

LION = "{_target_: flowrun.models.optimizers.lion, beta1: 0.9, beta2: 0.99, weight_decay: 0.1}"
NO_EFFECT = {
    "optim.momentum": (["optim=adamw", "optim.momentum=0.5"], "adamw does not read it"),
    "optim.betas": (["optim=sgd", "optim.betas=[0.9, 0.999]"], "sgd does not read it"),
    "optim.eps": (["optim=lion", "optim.eps=1e-3"], "lion does not read it"),
    "optim.sparse": (["optim.sparse=lazy"], "no table is updated by rows"),
    "optim.ema_eval": (["optim.ema_eval=false"], "optim.ema is off"),
    "zero.axis, zero.min_size": (["zero.axis=data", "zero.min_size=1"], "stage is 0"),
    "recompute.whole": (["recompute.whole=true"], "no modules"),
    "precision.reduce_dtype": (["precision.reduce_dtype=fp32"], "everything is computed in fp32"),
    "precision.accumulate_dtype": (["precision.accumulate_dtype=null"], "everything is computed"),
    "precision.attention": (["precision.attention=narrow"], "everything is computed in fp32"),
    "eval.every": (["eval.batches=0", "eval.every=3"], "no samples are held out"),
    "auto.trunk, auto.memory": (["auto.trunk=false", "auto.memory=off"], "auto.enabled is false"),
    "auto.plans": (["auto.plans=7"], "auto.placement is false"),
    "auto.seconds": (["auto.seconds=7"], "nothing is searched"),
    "auto.enabled": (["placement.axes.data=1", "parallel=auto"], "no axis has two ranks"),
    "train.keep": (["train.keep=5"], "save_every is 0"),
    "launch.threads": (["launch.threads=3"], "launch=virtual is one process"),
    "launch.rdzv_endpoint": (["launch.rdzv_endpoint='a:1'"], "there is one host"),
    "engine.blocking": (
        ["placement.axes.other=2", "engine.blocking=[data, other]"],
        "there are no collectives over other",
    ),
    "engine.overwrites": (
        ["engine.overwrites=false", "engine.compiler=inductor"],
        "the compiler does this itself",
    ),
}


@pytest.mark.parametrize(("keys", "asked"), list(NO_EFFECT.items()), ids=list(NO_EFFECT))
def test_a_key_that_changes_nothing_is_noted(keys: str, asked: tuple[list[str], str]) -> None:
    changes, why = asked
    (note,) = module._without_effect(job(MLP, *changes))
    assert note.startswith(f"{keys} has no effect: {why}")


EFFECT = {
    "a message order": ["launch.message_order_seed=3"],
    "bf16": ["precision.dtype=bf16", "precision.reduce_dtype=fp32"],
    "momentum": ["optim=sgd", "optim.momentum=0.5", "optim.nesterov=true"],
    "the group's own numbers": ["optim=lion"],
    "a function, with the group that is filled in": ["optim=adamw", f"optim.update={LION}"],
    "ZeRO": ["zero={axis: data, stage: 2, min_size: 1}"],
    "auto": ["parallel=auto", "auto.trunk=false"],
    "checkpoints": ["train.save_every=2", "train.keep=5"],
    "blocking": ["engine.blocking=[data]"],
}


@pytest.mark.parametrize("changes", list(EFFECT.values()), ids=list(EFFECT))
def test_a_key_that_changes_something_is_not(changes: list[str]) -> None:
    assert not list(module._without_effect(job(MLP, *changes)))


def test_a_recipe_that_asks_for_nothing_is_told_nothing() -> None:
    """Every row names keys of the schema, too."""
    recipe = load([MLP])
    for row in module.NO_EFFECT:
        assert not any(module._is_asked(recipe, row.section, key) for key in row.keys.split())


def test_adapters_beside_weights_that_nobody_trained_are_noted() -> None:
    lora = ("recipe=gpt_dp", "model.depth=1", "adapters.modules=[*.qkv]")
    (note,) = about("begins as its constructor makes it", *lora)
    assert note.endswith("model.weights is empty")
    assert not about("begins as its constructor makes it", *lora[:2])


def test_a_reference_that_nobody_trained_is_noted(tmp_path: Path) -> None:
    (note,) = about("the reference is as its constructor makes it", "recipe=distil_gpt")
    assert note.endswith("model.file is empty")
    assert about("the reference is as", "recipe=dpo_gpt") == [note]


def test_groups_that_an_update_has_no_parameter_for_are_noted() -> None:
    groups = "updates.1.optim={groups: {critic.*: {lr: 1}, generator.*: {frozen_until: 300}}}"
    (note,) = about("has no effect: generator trains no", "recipe=gan_images", groups)
    assert note.startswith("updates.1.optim.groups.critic.*")
    (note,) = about("frozen_until=300: the run ends before, after 300", "recipe=gan_images", groups)
    assert note.startswith("optim.groups.generator.*")
    groups = groups.replace("300", "299").replace("critic", "generator.0")
    assert not about("optim.groups", "recipe=gan_images", groups)


def packed_rows(folder: Path) -> tuple[str, ...]:
    save_tokenizer(folder)
    (folder / "rows.jsonl").write_text('{"text": "a few words of a text"}\n' * 40)
    rows = ("data=text_rows", f"data.path={folder}/rows.jsonl", f"data.tokenizer={folder}")
    small = ("model.depth=1", "model.vocabulary=280", "data.length=32", "train.batch_size=2")
    return *small, *rows, "data.pack=true"


def test_attention_of_packed_documents_is_foreseen_as_if_they_were_one(tmp_path: Path) -> None:
    keys = packed_rows(tmp_path)
    (note,) = about("attention is foreseen", "recipe=gpt_dp", *keys)
    assert note.endswith("with several a step takes less")
    assert not about("attention is foreseen", "recipe=gpt_dp", *keys[:-1])


@pytest.mark.parametrize(
    ("found", "kernel"), [(False, "FlashAttention 2"), (True, "FlashAttention 3")]
)
def test_the_kernel_of_packed_documents_is_named_where_a_gpu_trains(
    found: bool, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_flash_3", lambda: found)
    packed = job("recipe=gpt_dp", *packed_rows(tmp_path), "precision.dtype=bf16")
    assert len(list(module._note_packed_attention(packed))) == 1
    packed.device_type = "cuda"
    assert list(module._note_packed_attention(packed))[1].startswith(f"{kernel} attends within")


SLOW_IN_RANKS = """\
import os
import time

import samples


class Slow(samples.Samples):
    def __getitem__(self, index):
        if "RANK" in os.environ:  # what is foreseen was read by the launcher
            time.sleep(0.02)
        return super().__getitem__(index)
"""


@pytest.mark.processes
def test_a_run_blames_samples_for_a_slow_step_by_what_ranks_waited(place: Path) -> None:
    (place / "slow.py").write_text(SLOW_IN_RANKS)
    words = ("recipe=small", "data._target_=slow.Slow", "eval.batches=0", run_folder(place / "run"))
    ended = Command(place, *words).end()
    assert ended.status == 0
    measured = json.loads((place / "run" / "report.json").read_text())["measured"]
    assert all(0.04 < read_s < measured["step_s"] for read_s in measured["read_s"].values())
    said = re.search(r"note: a step takes .* x as long as foreseen; a rank waits (.*)", ended.out)
    loaded = "others" in measured  # then nothing else is blamed
    assert loaded or (said and "of it for samples" in said[1]), ended.out
