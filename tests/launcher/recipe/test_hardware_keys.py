from dataclasses import replace
from pathlib import Path

import pytest

from flowrun.engine.errors import RecipeError
from flowrun.engine.hardware.hardware import Hardware, on_hosts
from flowrun.engine.hardware.network import Level
from flowrun.engine.ir.graph import LogicalGraph
from flowrun.engine.ir.placement import Placement
from flowrun.engine.lowering.lower import start_plan
from flowrun.launcher.job.job import Job
from flowrun.launcher.job.recipe_strategy import strategy_of
from flowrun.launcher.recipe.compose import load
from flowrun.launcher.recipe.device import check_runs
from flowrun.launcher.recipe.hardware_keys import rank_hardware, shares_memory

FOLDER = Path(__file__).resolve().parents[3] / "conf/hardware"
PROFILES = sorted(file.stem for file in FOLDER.glob("*.yaml"))
HALF = ["hardware.fp32.flop=[1e6,1e9]", "hardware.fp32.share=[0.5,1]"]


def profile(name: str, *overrides: str) -> Hardware:
    return load(["recipe=gpt_dp", f"hardware={name}", *overrides]).hardware


@pytest.mark.parametrize("name", PROFILES)
def test_a_shipped_profile_names_itself_and_its_sources(name: str) -> None:
    hardware = profile(name)
    assert hardware.name == name
    assert hardware.source
    for curve in (hardware.fp32, hardware.tf32, hardware.bf16, hardware.fp16):
        assert list(curve.share) == sorted(curve.share)  # larger products are no slower


def test_the_engines_defaults_are_the_shipped_cpu_without_shared_memory() -> None:
    cpu = profile("cpu")
    levels = on_hosts(cpu.levels, 1, shared=False)
    own = {"elements_per_s": {}, "convolution_share": 1.0, "batched_share": 1.0}
    assert Hardware() == replace(cpu, source="", levels=levels, **own)


def test_a_profile_of_gpus_is_planned_with_on_a_machine_without() -> None:
    recipe = load(["recipe=gpt_dp", "hardware=dgx_a100", "placement.axes.data=16"])
    assert rank_hardware(recipe) == recipe.hardware
    assert not shares_memory(recipe)
    (link,) = recipe.hardware.links(Placement((("data", 16),), tuple(range(16))))
    assert link.bytes_per_s == 8 * recipe.hardware.levels[1].bytes_per_s


@pytest.mark.parametrize(
    ("words", "on_gpu", "pads", "one_order"),
    [
        ("engine.compiler=inductor", True, True, True),
        ("engine.compiler=inductor", False, False, False),
        ("engine.compiler=eager", True, False, True),
        ("engine.compiler=inductor engine.pad_classes=never", True, False, True),
        ("engine.pad_classes=always", False, True, False),
    ],
)
def test_a_gpu_has_one_order_of_launches_and_built_code_pads_its_classes(
    words: str, on_gpu: bool, pads: bool, one_order: bool
) -> None:
    hardware = f"hardware={'h100' if on_gpu else 'cpu'}"
    strategy = strategy_of(load(["recipe=gpt_dp", hardware, *words.split()]))
    assert strategy.pads_classes is pads
    graph = LogicalGraph((), {})
    assert start_plan(graph, strategy).one_order is one_order


def test_gpus_are_planned_for_and_run_on_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrun.launcher.recipe.device._num_gpus", lambda: 0)
    recipe = load(["recipe=gpt_dp", "hardware=h100", "launch.device=cuda"])
    assert Job(recipe, values=False).device_type == "cuda"
    with pytest.raises(RecipeError, match="need a GPU each; torch sees 0"):
        check_runs(recipe)
    monkeypatch.setattr("flowrun.launcher.recipe.device._num_gpus", lambda: 1)
    with pytest.raises(RecipeError, match="NCCL_MULTI_RANK_GPU_ENABLE=1 has ranks share a GPU"):
        check_runs(recipe)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    check_runs(recipe)


@pytest.mark.parametrize(
    ("gpu", "expected", "is_its_own"),
    [
        ("NVIDIA H200", "h200", True),
        ("NVIDIA H200 NVL", "h200", False),
        ("NVIDIA H100 80GB HBM3", "h100", True),
        ("NVIDIA H100 PCIe", "h100", False),
        ("Tesla V100-SXM2-16GB", "v100_cluster", True),
        ("NVIDIA A100-SXM4-40GB", "dgx_a100", False),
        ("NVIDIA L4", "dgx_a100", False),
        ("NVIDIA GH200", "h200", False),
        ("NVIDIA GB200", "b200", False),
        ("", "dgx_a100", False),
    ],
)
def test_ranks_on_gpus_are_planned_for_by_a_profile_of_theirs(
    gpu: str, expected: str, is_its_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrun.launcher.recipe.device._num_gpus", lambda: 8)
    monkeypatch.setattr("flowrun.launcher.recipe.hardware_keys.gpu_name", lambda: gpu)
    one = load(["recipe=gpt_dp", "placement.axes.data=2"])
    assert rank_hardware(one).name == expected
    assert not shares_memory(one)
    job = Job(one, values=False)
    # a host under load, a cache that is not written and a hidden module have a note, too
    (note,) = (each for each in job.notes if each.startswith("hardware="))
    assert note.startswith(f"hardware={expected}: ranks run on ")
    assert ("this profile is of another GPU" in note) != is_its_own
    assert job.is_profiled == is_its_own
    cpu = load(["recipe=gpt_dp", "placement.axes.data=2", "launch.device=cpu"])
    assert rank_hardware(cpu).name == "cpu"
    assert not [n for n in Job(cpu, values=False).notes if n.startswith("hardware=")]


def test_memory_may_be_written_with_an_exponent() -> None:
    assert profile("cpu", "hardware.memory_bytes=16e9").tensor_bytes == 16 * 10**9


def test_cores_that_no_rank_computes_on_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    one = load(["recipe=gpt_dp", "placement.axes.data=2"])
    assert rank_hardware(one).cores == 4
    threads = load(["recipe=gpt_dp", "placement.axes.data=2", "launch.threads=8"])
    assert (rank_hardware(threads).cores, rank_hardware(threads).core) == (0.5, 0.5)


def test_ranks_that_share_a_core_share_what_it_does() -> None:
    whole, half = profile("cpu"), profile("cpu").slow_down(0.5)
    assert half.fp32.seconds(1e9) == pytest.approx(2 * whole.fp32.seconds(1e9))
    assert (half.op_s, half.act_s) == (2 * whole.op_s, 2 * whole.act_s)
    assert half.levels[0].bytes_per_s == whole.levels[0].bytes_per_s / 2  # in shared memory
    assert half.levels[0].latency_s == 2 * whole.levels[0].latency_s
    assert half.levels[1] == whole.levels[1]
    assert whole.slow_down(1.0) == whole


LENGTHS = f"{HALF[0]} hardware.fp32.share"


@pytest.mark.parametrize(
    ("override", "inside", "problem"),
    [
        ("hardware.memory_bytes_per_s=0", "", "is over 0, not 0"),
        ("hardware.fp32.flops=0", "", "is over 0, not 0"),
        ("hardware.bf16.flops=-1", "", "is 0 or more, not -1"),
        ("hardware.fp32.flop=[2e6,1e6]", "", "does not grow"),
        (f"{LENGTHS}=[0.5]", "", "another length than flop"),
        (f"{LENGTHS}=[0.5,1.5]", ".1", "at most 1"),
        ("hardware.attention=[{width:64}]", ".0.keys", "is empty"),
        ("hardware.attention=[{keys:[64],forward:[1]}]", ".0.backward", "another length than keys"),
        ("hardware.attention=[{key:64}]", "", "has no key 'key'"),
        ("hardware.levels=[]", "", "nothing joins ranks"),
        ("hardware.levels=[{ranks:4},{ranks:6}]", ".1.ranks", "not a multiple"),
        ("hardware.levels=[{busy_s:1e-6}]", ".0.busy_s", "is more than latency_s"),
        ("hardware.levels=[{bytes_per_s:0}]", ".0.bytes_per_s", "is over 0"),
        ("hardware.levels=[{exchange_bytes:{1:64}}]", ".0.exchange_bytes", "not a size of a group"),
        (
            "hardware.levels=[{shared_memory:true,exchange_bytes:{2:64}}]",
            ".0.exchange_bytes",
            "on this level",
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused(override: str, inside: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem) as error:
        profile("cpu", *override.split())
    assert error.value.where == override.split()[-1].partition("=")[0] + inside


def mesh(*rows: str, below: str = "", ranks: int = 3) -> list[str]:
    """A level of links without a switch, perhaps around another."""
    quoted = ",".join(f"'{row}'" for row in rows)
    return [f"hardware.levels=[{below}{{ranks: {ranks}, mesh: [{quoted}]}}, {{}}]"]


def test_a_mesh_is_a_row_of_digits_for_each_rank() -> None:
    assert profile("cpu", *mesh("021", "201", "110")).levels[0].mesh == ("021", "201", "110")


@pytest.mark.parametrize(
    ("overrides", "where", "problem"),
    [
        (mesh("021", "201", "110", ranks=6), ".0", "a mesh of 3 ranks .* unit of 6"),
        (mesh("021", "201", "110", ranks=0), ".0", "a mesh of 3 ranks .* unit of all"),
        (mesh("01", "10", below="{ranks: 2},", ranks=4), ".1", "not of the innermost level"),
        (mesh("021", "201", "11"), ".0", "the links between 3 ranks"),
        (mesh("021", "201", "1-0"), ".0", "the links between 3 ranks"),
        (mesh("021", "101", "110"), ".0", "the links between 3 ranks"),  # not alike both ways
        (mesh("121", "201", "110"), ".0", "the links between 3 ranks"),  # to itself
        (mesh("010", "100", "000"), ".0", "the links between 3 ranks"),  # none at all
    ],
    ids=["too few", "of all", "outer", "short", "sign", "one way", "itself", "none"],
)
def test_links_that_cannot_be_are_refused(overrides: list[str], where: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem) as error:
        profile("cpu", *overrides)
    assert error.value.where == f"hardware.levels{where}.mesh"


def test_a_curve_can_be_set_on_the_command_line() -> None:
    assert profile("cpu", *HALF).fp32.share_at(1e9) == 1.0


def test_ranks_in_a_crowd_wait_for_a_core() -> None:
    level = Level(latency_s=1e-4, shared_memory=True, crowded_latency_s=1e-3)
    assert [level.slow_down(share).latency_s for share in (1.0, 0.5, 0.25)] == [1e-4, 1e-3, 1e-3]
    waited = [level.slow_down(share).crowding_s for share in (1.0, 0.5, 0.25)]
    assert waited == pytest.approx([0.0, 9e-4, 9e-4])
