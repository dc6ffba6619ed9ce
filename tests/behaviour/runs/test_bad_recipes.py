"""Each mistake in a recipe is one located error, exit status 2, no traceback, nothing started."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.launcher.recipe.compose import load
from support.runs.workplace import End

MLP = "defaults: [/model: mlp, /data: digits]\n"

# arguments, of which the last is at fault -> what is said of it
OF_THE_LAST = {
    "recipe=gpt_hybird": "Did you mean 'gpt_hybrid'?",
    "recipe=x/y.yaml": "there is no file x/y.yaml",
    "recipe=gpt_dp model=gpt_tinny": "Did you mean 'gpt_tiny'?",
    "recipe=gpt_dp launch=nope": "local, ray, slurm, virtual",
    "recipe=gpt_dp train.stepz=3": "Did you mean 'steps'?",
    "recipe=gpt_dp nokey=3": "has no key 'nokey'",
    "recipe=gpt_dp +train.foo=3": "'train' has no key 'foo'",
    "recipe=gpt_dp engine.loss_chunks=4": "made, which the metric accuracy reads",
    "recipe=gpt_dp train.keep_best=null": "Write train.keep_best=, the default",
    "recipe=gpt_dp train.steps=abc": "Write an integer, such as 100",
    "recipe=gpt_dp train=3": "only a mapping of keys",
    "gpt_hybrid": "recipe=gpt_hybrid?",
    "plan my/own.yaml": "recipe=my/own.yaml?",
    "bench": "peers           GPT, 2 ranks",
    "recipe=gpt_dp --foo": "Options are --cfg",
    "recipe=mlp_hybrid hydra.job.chdir=true": "",
    "recipe=gan_images updates.0.nam=x": "Did you mean 'name'?",
    "recipe=mlp_hybrid data.bukets=[4]": "Did you mean 'buckets'?",
    "recipe=mlp_hybrid model.weight=x": "Did you mean 'weights'?",
    "recipe=distil_gpt model.file=no.safetensors": "there is no file no.safetensors",
    "recipe=simclr data.field=image": "There is: images, labels",
    "hlep": "Did you mean '--help'?",
    "version": "Did you mean '--version'?",
    "train": "Did you mean 'run'?",
    "doctor": "Commands: run, plan, verify",
    "recipe=gpt_dp steps": "not of the form key=value",
    "recipe=gpt_tp sbp.head.weight.tensor=Q": "Write S(0) or S0",
    "recipe=gpt_tp sbp.head.weight.tensr=S0": "'tensor'?",
    "recipe=gpt_dp recompute.modules=[block.*]": "'block.*' matches no module",
    "recipe=gpt_dp recompute.keep=[matmul]": "Name modules",
    "recipe=gpt_tp placement.axes.in=2": "cannot name an axis",
    "recipe=gpt_tp placement.axes.tensor=0": "at least 1",
    "recipe=gpt_pp placement.stages=0": "a number of at least 1",
    "recipe=gpt_pp placement.stages=two": "a list of",
    "recipe=gpt_pp placement.in_flight=1g1b": "Write an integer, gpipe, 1f1b, zero_bubble,",
    "recipe=gpt_pp placement.in_flight=v_half placement.chunks=3": "Write placement.chunks=2",
    "recipe=gpt_pp placement.schedule._target_=torch.nn.Linear": "is not a schedule",
    "recipe=gpt_pp placement.in_flight=0": "at least 1",
    "recipe=gpt_pp placement.chunks=0": "at least 1",
    "recipe=mlp_pipeline placement.chunks=9": "Write chunks: 1",
    "recipe=gpt_dp placement.chunks=2": "Add stages",
    "recipe=gpt_zero zero.axis=dat": "Did you mean 'data'?",
    "recipe=gpt_zero zero.stage=4": "at most 3",
    "recipe=gpt_dp engine.compiler=inducter": "Write eager, inductor or handwritten",
    "recipe=gpt_dp engine.compiler=handwritten": "Write eager or inductor",
    "recipe=gpt_dp view=mirror": "mirrored",
    "recipe=gpt_tp view=mirrored": "the axis tensor divides",
    "recipe=gpt_pp view=mirrored": "placement.stages divides",
    "recipe=gpt_tp zero.stage=1": "Set zero.axis",
    "recipe=gpt_dp train.micro_batches=5": "1, 2, 4, 8, 16, 32",
    "recipe=gpt_dp train.steps=0": "at least 1",
    "recipe=gpt_dp train.batch_size=0": "at least 1",
    "recipe=gpt_dp optim.name=adamv": "adagrad, adamw",
    "recipe=gpt_dp optim.name=rmsprop": "optim._target_: torch.optim.RMSprop",
    "recipe=gpt_dp optim.lr=0": "over 0",
    "recipe=gpt_dp optim.betas=[0.9]": "two numbers",
    "recipe=gpt_dp optim.nesterov=true": "optim.momentum",
    "recipe=gpt_dp precision.dtype=fp8": "fp32, bf16 or fp16",
    "recipe=gpt_dp precision.dtype=bf16 precision.loss_scale=1024": "precision.dtype=fp16",
    "recipe=gpt_dp precision.dtype=fp16 precision.loss_scale=never": "dynamic",
    "recipe=gpt_dp precision.dtype=fp16 precision.reduce_dtype=fp16": "fp32 or null",
    "recipe=gpt_dp precision.dtype=fp16 precision.accumulate_dtype=fp16": "fp32 or null",
    "recipe=gpt_dp launch.name=nope": "local, virtual, slurm or ray",
    "recipe=gpt_dp launch.device=tpu": "auto, cpu or cuda",
    "recipe=gpt_dp launch.transport=tcp": "auto, shared or gloo",
    "recipe=gpt_dp eval.fraction=1": "below 1",
}
# arguments -> (a part of the place, what is said)
ELSEWHERE = {
    "recipe=mlp_hybrid optim._target_=torch.optim.LBFGS": (
        "command line  optim._target_",
        "Write its update as a function",
    ),
    "recipe=gpt_dp engine.blocking=[tensor]": ("engine.blocking = ", "There is: data"),
    "recipe=gpt_dp recompute.modules=[blocks.*] recompute.keep=[conv]": (
        "command line  recompute.keep.0 = ",
        "Write matmul, every_second_matmul, attention or boxing",
    ),
    "recipe=mlp_pipeline log=[[0,1]]": ("log.0", "[0, 1] is not a logger."),
    "recipe=mlp_pipeline placement.schedule._target_=flowrun.engine.actors.schedules.VHalf": (
        "placement.chunks",
        "Write placement.chunks=2",
    ),
    "recipe=mlp_pipeline placement.schedule._target_=flowrun.engine.actors.schedules.Slots": (
        "placement.schedule",
        "Slots failed: TypeError",
    ),
    "recipe=mlp_pipeline placement.schedule._target_=flowrun.engine.actors.schedules.Slots"
    " +placement.schedule.number=0": ("placement.schedule", "Slots.held(stage 0, chunk 0) is 0."),
    "recipe=gpt_pp placement.schedule._target_=a.B placement.in_flight=2": (
        "placement.schedule",
        "names a schedule, too",
    ),
    "recipe=gpt_pp placement.schedule._target_=a.B auto.placement=true": (
        "placement.schedule",
        "auto.placement=false",
    ),
    "recipe=mlp_hybrid updates.0.name=x": ("command line  updates.0", "has no such entry"),
    "train.steps=3": ("command line  recipe", "recipe=path/to/file.yaml"),
    "plan gpt_hybird": ("gpt_hybird", "recipe=gpt_hybrid?"),
    "trian recipe=gpt_dp": ("command line  trian", "Did you mean 'run'?"),
    "generate runs/x": ("command line  generate", "Did you mean 'sample'?"),
    "calibrat x.yaml": ("command line  calibrat", "'calibrate'?"),
    "recipe=gpt_dp steps=5": ("steps = 5", "train.steps?"),
    "recipe=gpt_dp --steps 5": ("--steps", "Write train.steps="),
    "plan --json": ("--json", "--level"),
    "recipe=mlp_hybrid launch=virtual train.steps=${oc.env:NO_SUCH}": (
        "command line  train.steps = ${oc.env:NO_SUCH}",
        "NO_SUCH is not set",
    ),
    "plan recipe=gpt_dp --batch-size=8": ("--batch", "train.batch_size=8"),
    "recipe=gpt_dp train.steps=[1": ("command line  train.steps=[1", "cannot be read"),
    "recipe=gpt_dp 'sbp={\"head.weight\":{data:S0}}'": (
        "command line  ++sbp",
        "no quotes: sbp={head.weight: …}",
    ),
    "recipe=gpt_dp,gpt_tp": ("command line  recipe=gpt_dp,gpt_tp", "Add -m"),
    "recipe=gpt_tp 'sbp={head: S0}'": ('command line  sbp.head = "S0"', "does not name an axis"),
    "recipe=gpt_dp view=mirrored sbp.head.weight.data=S0": (
        "command line  view = mirrored",
        "sbp.head.weight.data lays out one logical batch",
    ),
    "recipe=gpt_dp precision={dtype:bf16,accumulate_dtype:null,reduce_dtype:fp32}": (
        "precision.reduce_dtype",
        "precision.accumulate_dtype=fp32",
    ),
    "recipe=gpt_dp launch.transport=shared launch.nnodes=2": (
        "command line  launch.transport = shared",
        "CPU ranks of one host",
    ),
    "recipe=gpt_dp launch.nnodes=2": ("conf/launch", "host:port"),
    "recipe=gpt_dp data=digits": ("gpt_tiny.yaml", "'data.length' not found"),
}

# what stands in a file after MLP -> (line, column, key and value, what is said of it)
AFTER_MLP = {
    "train: {stepz: 3}": ("2:16  train.stepz = 3", "Did you mean 'steps'?"),
    "train: {steps: three}": ('2:16  train.steps = "three"', "Write an integer"),
    "task: 3": ("2:7  task = 3", "inputs, loss, metrics"),
    "zero: {axis: dat}": ('2:14  zero.axis = "dat"', "has no axis 'dat'"),
    "placement: {axes: {data: 2}}\nsbp:\n  out*.weight: {data: S0, tensor: Z}": (
        '4:35  sbp.out*.weight.tensor = "Z"',
        "Write S(0) or S0",
    ),
    "placement: {stages: [{module: [hidden]}]}": (
        "2:31  placement.stages.0.module = [hidden]",
        "Did you mean 'modules'?",
    ),
    "placement: {stages: [{ranks: [0, 1]}], axes: {data: 1, tensor: 2}}": (
        "2:30  placement.stages.0.ranks = [0, 1]",
        "1 lists deep, but placement.axes has 2 axes",
    ),
    "placement: {stages: [{ranks: [[0, 1], [2]]}], axes: {data: 2, tensor: 2}}": (
        "2:30  placement.stages.0.ranks",
        "its rows differ in length",
    ),
    "placement: {stages: [{ranks: [0, 1]}, {ranks: [1, 2]}], axes: {data: 2}}": (
        "2:47  placement.stages.1.ranks = [1, 2]",
        "rank 1 is listed twice",
    ),
    "placement: {stages: [{ranks: [0, 2]}, {ranks: [1, 3]}], axes: {data: 2}}": (
        "2:30  placement.stages.0.ranks",
        "are not contiguous",
    ),
    "placement: {stages: [{ranks: [1, 2]}], axes: {data: 2}}": (
        "2:21  placement.stages",
        "no stage has rank 0",
    ),
    "placement: {stages: [{ranks: [0, 1]}], axes: {data: 4}}": (
        "2:53  placement.axes.data = 4",
        "no stage has 4 ranks",
    ),
    "placement: {stages: [{modules: [hidden]}, {}]}": ("placement.stages.1", "lists no modules"),
    "model: {_target_: tourch.nn.Linear}": (
        '2:19  model._target_ = "tourch.nn.Linear"',
        "Did you mean 'torch'?",
    ),
    "model: {_target_: flowrun.models.mlp.MPL}": ("2:19  model._target_", "Did you mean 'MLP'?"),
    "model: {hiden: 3}": ("2:16  model.hiden = 3", "Did you mean 'hidden'?"),
    "data: {_target_: flowrun.launcher.data.digits.Digit}": ("2:18  data._target_", "'Digits'?"),
    "data: {_target_: flowrun.launcher.data.mixture.DataMixture, sources:\n"
    "  {own: {_target_: flowrun.launcher.data.corpus.text.Text, path: no/such}}}": (
        '3:66  data.sources.own.path = "no/such"',
        "there is no file or folder no/such.",
    ),
    "data: {_target_: flowrun.launcher.data.corpus.tokens.Tokens, path: bad.yaml, dtype: uint32}": (
        '2:85  data.dtype = "uint32"',
        "bytes of bad.yaml are not a whole number of uint32.",
    ),
    "task: {inputs: {x_BI: image}}": ('2:23  task.inputs.x_BI = "image"', "Did you mean 'images'?"),
    "task: {inputs: {x: images}}": ('2:20  task.inputs.x = "images"', "takes no 'x'"),
    "task: {loss: {targt: labels}}": ('2:22  task.loss.targt = "labels"', "'target'?"),
}
# all of a file -> the same
WHOLE = {
    "train:\n  steps: 3\n   x: [1": ("3:5", "This file is not valid YAML"),
    "- 1": ("recipe = bad.yaml", "does not hold a mapping of keys"),
    "": ("model._target_", "nothing says what to build"),
    "defaults: [/model: mpl]": ('1:20  model = "mpl"', "Did you mean 'mlp'?"),
    "defaults: {model: mlp}": ("1:11  defaults", "defaults must be a list"),
    "defaults: [/data: digits]\nmodel: {_target_: builtins.dict}": (
        "2:19  model._target_",
        "not a torch.nn.Module",
    ),
    "defaults: [/data: digits]\nmodel: {_target_: flowrun.models.mlp.MLP, inputs: 3}": (
        "2:8  model =",
        "needs the argument 'hidden'",
    ),
    "defaults: [/model: gpt_tiny, /data: text]\nmodel: {width: 130}": (
        "2:8  model =",
        "not a multiple",
    ),
    "defaults: [/model: gpt_tiny, /data: text]\ndata: {path: no/such}": (
        '2:14  data.path = "no/such"',
        "there is no file or folder no/such.",
    ),
}
FILES = {**{MLP + text: said for text, said in AFTER_MLP.items()}, **WHOLE}


def refusal(end: End, *arguments: str) -> list[str]:
    """What the command line says of arguments that it must refuse, line by line."""
    status, out, err = end(*arguments)
    assert (status, "Traceback" in err) == (2, False), err
    assert all(line.endswith(" …") for line in out.splitlines())  # phases, no figures
    assert not [*Path("outputs").glob("*/*")]
    return err.splitlines()


def last_of(arguments: str) -> str:
    """The place of the last argument."""
    key, equals, value = shlex.split(arguments)[-1].lstrip("+").partition("=")
    return f"command line  {key} = {value}" if equals else f"command line  {key}"


ARGUMENTS = {**{given: (last_of(given), said) for given, said in OF_THE_LAST.items()}, **ELSEWHERE}


@pytest.mark.parametrize(("arguments", "expected"), ARGUMENTS.items(), ids=ARGUMENTS)
def test_a_wrong_argument_is_one_located_error(
    end: End, arguments: str, expected: tuple[str, str]
) -> None:
    lines = refusal(end, *shlex.split(arguments))
    assert expected[0] in lines[0]
    assert expected[1] in " ".join(lines[1:])


@pytest.mark.parametrize(
    ("text", "place", "rest"), [(k, *v) for k, v in FILES.items()], ids=[*AFTER_MLP, *WHOLE]
)
def test_a_wrong_file_is_one_located_error(
    end: End, workplace: Path, text: str, place: str, rest: str
) -> None:
    (workplace / "bad.yaml").write_text(f"{text}\n" if text else "")
    lines = refusal(end, "recipe=bad.yaml", "launch=virtual")
    assert "bad.yaml" in lines[0] and place in lines[0]
    assert rest in " ".join(lines[1:])


def test_no_model_is_found_in_the_working_directory_until_it_is_there(
    end: End, workplace: Path
) -> None:
    (workplace / "bad.yaml").write_text(
        "defaults: [/data: digits]\nmodel: {_target_: my_own_net.Net}\n"
    )
    words = ("recipe=bad.yaml", "launch=virtual")
    assert "there is no module 'my_own_net'" in refusal(end, *words)[1]
    (workplace / "my_own_net.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    pass\n"
    )
    assert "Net needs the argument 'in_features'" in refusal(end, *words)[1]


def test_the_real_command_ends_with_status_2_and_no_traceback(workplace: Path) -> None:
    command = [sys.executable, "-m", "flowrun.launcher.cli", "recipe=gpt_zero", "zero.axis=dat"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=workplace)
    assert ended.returncode == 2
    assert re.fullmatch(
        r"command line  zero\.axis = dat\n  .*\n  Did you mean 'data'\?\n", ended.stderr
    )


@pytest.mark.parametrize(("name", "near"), [("tensr", "tensor"), ("dta", "data"), ("Data", "data")])
def test_an_axis_that_is_misspelled_is_refused(name: str, near: str) -> None:
    with pytest.raises(RecipeError, match=f"Did you mean '{near}'") as error:
        load(["recipe=gpt_hybrid", f"placement.axes.{name}=4"])
    assert error.value.where == f"placement.axes.{name}"


@pytest.mark.parametrize(
    "changes",
    [
        ["+placement.axes.tensr=4"],
        ["placement.axes.tensr=4", "sbp.head.weight.tensr=S0"],
        ["placement.axes.datum=4", "zero={axis: datum, stage: 1}"],
        ["placement.axes.tensor2=4"],
        ["placement.axes.expert=4"],
    ],
    ids=["plus", "pinned", "ZeRO", "numbered", "unlike"],
)
def test_an_axis_that_is_meant_is_taken(changes: list[str], workplace: Path) -> None:
    recipe = load(["recipe=gpt_hybrid", *changes])
    assert recipe.num_ranks == 16
    (workplace / "again.yaml").write_text(recipe.to_yaml())
    assert load(["recipe=again.yaml"]).axes == recipe.axes
