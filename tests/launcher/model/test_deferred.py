import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flowrun.engine.runtime.drivers.virtual import VirtualCluster
from flowrun.engine.runtime.kernels.live_bytes import LiveBytes
from flowrun.engine.runtime.rank.rank import Rank
from flowrun.launcher.job.job import Job
from flowrun.launcher.model.build import describe_model, instantiate_model
from flowrun.launcher.model.deferred import LEAST_BYTES, Unrecordable, defer
from flowrun.launcher.model.initial import initial_of, named_tensors
from flowrun.launcher.recipe.compose import load
from support.checks.thorough import few
from support.layouts.grids import weights_of
from support.nets.architectures import ARCHITECTURES
from support.samples.constructors import MODULES, FromArrays, Tables

CPU = torch.device("cpu")
GPT = ["recipe=gpt_tp", "model.depth=2", "data.max_bytes=100000", "engine.cache=false"]


T = TypeVar("T")


def _seeded(make: Callable[[], T]) -> T:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return make()


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit; not a number is itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    a, b = (x.detach().contiguous().view(-1).view(torch.uint8) for x in (one, other))
    return torch.equal(a, b)


def assert_as_plain_torch(make: Callable[[], nn.Module], least_bytes: int = 0) -> None:
    """Values, and what the generator gives next."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        plain, next_plain = named_tensors(make()), torch.rand(3)
        torch.manual_seed(5)
        model, initial = defer(make, least_bytes=least_bytes)
        after = torch.get_rng_state()
        assert same(torch.rand(3), next_plain)
        assert list(initial) == list(plain) == list(named_tensors(model))
        torch.set_rng_state(after)
        different = [name for name in reversed(plain) if not same(initial[name], plain[name])]
        assert not different
        assert torch.equal(torch.get_rng_state(), after)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_values_are_those_of_plain_torch_bit_by_bit(name: str) -> None:
    assert_as_plain_torch(MODULES[name])


@pytest.mark.parametrize("name", few(ARCHITECTURES, [*ARCHITECTURES][::4]))
def test_so_are_those_of_published_architectures(name: str) -> None:
    assert_as_plain_torch(lambda: ARCHITECTURES[name].make(2))


@pytest.mark.parametrize("threads", [1, 2])
def test_so_are_those_of_large_weights_whatever_threads_a_rank_has(threads: int) -> None:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(300, 500), nn.Embedding(700, 90), nn.LayerNorm(40))
        nn.init.orthogonal_(net[0].weight)
        nn.init.trunc_normal_(net[1].weight, std=0.02)
        return net

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as a launcher does
    try:
        plain = named_tensors(_seeded(make))
        model, initial = _seeded(lambda: defer(make))
        assert not model[0].weight.data_ptr()
        assert model[2].weight.data_ptr()
        torch.set_num_threads(threads)
        assert all(same(initial[name], value) for name, value in plain.items())
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


STEPS: Mapping[str, Callable[[list[Tensor]], object]] = {
    "zeros": lambda t: t.append(torch.zeros(4, 6)),
    "randn": lambda t: t.append(torch.randn(4, 6)),
    "range": lambda t: t.append(torch.arange(24.0).view(4, 6)),
    "normal": lambda t: t[-1].normal_(),
    "uniform": lambda t: t[0].uniform_(-1, 1),
    "scale": lambda t: t[-1].mul_(0.5),
    "row": lambda t: t[-1][1:3].fill_(2.0),
    "columns": lambda t: t[-1][:, ::2].add_(t[0][:, 1::2]),
    "turned": lambda t: t.append(torch.randn(6, 4).t()),
    "view": lambda t: t.append(t[-1].t()[:].t()),
    "other": lambda t: t.append(t[-1] * 3 + t[0]),
    "clone": lambda t: t.append(t[0].clone()),
    "copy": lambda t: t[0].copy_(t[-1]),
    "turn": lambda t: t.insert(0, t.pop()),
    "swap data": lambda t: setattr(t[0], "data", t[-1].detach()),
    "read": lambda t: t[-1].mul_(float(t[0].sum())),
    "decide": lambda t: t[-1].normal_() if t[0].mean() > 0 else None,
    "drop": lambda t: t.append(nn.functional.dropout(t.pop(), 0.3)),
}


@settings(max_examples=150)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=14))
def test_any_order_of_ops_and_aliases_makes_the_same(steps: list[str]) -> None:
    def make() -> nn.Module:
        tensors = [torch.zeros(4, 6)]
        for step in steps:
            STEPS[step](tensors)
        net = nn.Module()
        for k, tensor in enumerate(tensors):
            net.register_buffer(str(k), tensor)
        return net

    assert_as_plain_torch(make)


# ---- what a module is left with ------------------------------------------------------------------


def test_what_is_no_parameter_and_no_buffer_has_its_values() -> None:
    model, initial = _seeded(lambda: defer(Tables, least_bytes=0))
    plain = _seeded(Tables)
    assert same(model.mask, plain.mask)
    assert same(model.rows, plain.rows)
    assert same(model.loose[0], plain.loose[0])
    assert model.rows.untyped_storage()._cdata == model.mask.untyped_storage()._cdata
    assert not model.places.data_ptr()
    assert "loose" not in initial


def test_tied_weights_stay_one() -> None:
    model, _ = defer(MODULES["tied"], least_bytes=0)
    assert model.head.weight is model.embed.weight
    assert isinstance(model.head.weight, nn.Parameter)
    assert model.front.untyped_storage()._cdata == model.back.untyped_storage()._cdata


def test_nothing_is_left_behind_in_torch() -> None:
    defer(MODULES["linear"], least_bytes=0)
    assert nn.Linear(300, 300).weight.data_ptr()
    threading.Thread(target=int).start()


def test_values_of_a_plan_alone_are_not_drawn() -> None:
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        model, _ = defer(lambda: nn.Linear(400, 400, bias=False), draws=False)
        assert torch.equal(torch.get_rng_state(), before)
    assert not model.weight.data_ptr()


# ---- what cannot be recorded ---------------------------------------------------------------------


class Threaded(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        thread = threading.Thread(target=self.reset_parameters)
        thread.start()
        thread.join()


class Pointed(nn.Linear):
    """Its weight is written to through numpy."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.weight.detach().numpy()[0] = 7.0


class Caught(nn.Linear):
    """It takes another way if there is no numpy."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        try:
            self.weight.detach().numpy()[0] = 7.0
        except Exception:
            nn.init.zeros_(self.weight)


class Rowwise(nn.Module):
    """An element at a time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))
        with torch.no_grad():
            for k in range(width * width):
                self.weight.view(-1)[k] = k


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Threaded, "thread"), (Pointed, "numpy"), (Caught, "numpy"), (Rowwise, "10000 times")],
)
def test_what_cannot_be_recorded_is_told_and_made_whole(
    kind: type[nn.Module], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unrecordable, match=why):
        defer(lambda: kind(150))
    monkeypatch.setattr("flowrun.launcher.model.build.make_object", lambda target, where: kind(150))
    recipe = load(GPT)
    described, plain = describe_model(recipe), instantiate_model(recipe)
    (note,) = described.notes
    assert "whole" in note
    assert why in note
    assert all(same(described.initial[name], value) for name, value in named_tensors(plain).items())


def test_values_that_no_op_makes_are_held_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "flowrun.launcher.model.build.make_object", lambda target, where: FromArrays(10_000)
    )
    (note,) = describe_model(load(GPT)).notes
    assert note.startswith("the launcher holds 0.4 MB of weights and buffers")
    assert "taken and 1 more" in note


def test_a_mistake_of_the_constructor_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="size of tensor a"):
        instantiate = MODULES["init product"]
        defer(lambda: nn.Sequential(instantiate(), nn.Linear(2, 2).weight + torch.ones(3)))


# ---- memory --------------------------------------------------------------------------------------


class Memory(LiveBytes):
    """Storages without memory take none."""

    def _add(self, tensors: Iterable[Tensor]) -> None:
        super()._add(x for x in tensors if x.data_ptr())

    @property
    def left(self) -> int:
        self.count.drop_dead()
        return self.count.live


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_dropped_weights_go_back_to_the_system() -> None:
    """Of 84 MB of weights in a process of its own."""
    program = (
        "from torch import nn\n"
        "from flowrun.launcher.model.deferred import defer\n"
        "from flowrun.engine.runtime.process.process_memory import taken\n"
        "sizes, before = (300, 700, 1100, 900) * 10, taken()\n"
        "model = defer(lambda: nn.Sequential(*(nn.Linear(n, 700) for n in sizes)))\n"
        "print(taken() - before)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert int(told.stdout) < 10_000_000


def _large(*overrides: str) -> list[str]:
    return [*GPT, "model.width=256", "data.length=32", "optim=sgd", "optim.momentum=0", *overrides]


def test_the_launcher_never_holds_more_than_a_weight_and_what_is_small() -> None:
    recipe = load(_large())
    plain = named_tensors(instantiate_model(recipe))
    with Memory() as memory:
        described = describe_model(recipe)
    small = sum(x.nbytes for x in plain.values() if x.nbytes < LEAST_BYTES)
    assert not described.notes
    assert memory.left <= small
    assert memory.peak <= small + max(x.nbytes for x in plain.values())
    assert 6 * memory.peak < sum(x.nbytes for x in plain.values())


LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "one rank": ("placement.axes.tensor=1",),
    "tensor": ("placement.axes.tensor=2",),
    "stages": ("placement.axes.tensor=1", "placement.stages=2"),
    "ZeRO 3": ("placement.axes={data: 2, tensor: 1}", "zero={axis: data, stage: 3}"),
    "hybrid": ("placement.axes.tensor=2", "placement.stages=2"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_never_holds_more_than_its_shards_and_a_weight(layout: str) -> None:
    job = Job(load(_large(*LAYOUTS[layout])))
    plan = job.training.plan
    for rank in (p.ranks[-1] for p in plan.placements):
        with Memory() as memory:
            body = Rank(plan, rank, job.materials.sampler, job.materials.initial, CPU)
        own = sum(x.nbytes for x in body.variables.values())
        states = {v.tensor for v in plan.graph.variables if v.kind == "state"}
        weights = sum(x.nbytes for name, x in body.variables.items() if name not in states)
        largest = max(
            torch.Size(plan.graph.tensors[v.tensor].shape).numel() * 4
            for v in plan.graph.variables
            if v.stage == plan.stage_of(rank)
        )
        assert own == memory.left
        assert memory.peak <= max(own, weights + largest)  # states come when the weights are there


def test_layouts_begin_with_the_values_of_plain_torch() -> None:
    plain = named_tensors(instantiate_model(load(_large())))
    for layout in LAYOUTS.values():
        job = Job(load(_large(*layout)))
        cluster = VirtualCluster(job.training.plan, job.materials.sampler, job.materials.initial)
        trained = {v.name for v in job.training.plan.graph.variables if v.kind == "parameter"}
        assert trained == plain.keys()
        found = weights_of(cluster)
        assert all(same(found[name], plain[name]) for name in trained)


# ---- what is relied upon of torch ----------------------------------------------------------------


def test_every_op_that_takes_a_generator_is_tagged_as_one_that_draws() -> None:
    of_scripts = {"aten::manual_seed", "aten::initial_seed", "aten::seed"}
    of_scripts |= {"aten::_no_grad_normal_", "aten::_no_grad_uniform_"}
    untagged = []
    for schema in torch._C._jit_get_all_schemas():
        if (
            schema.name.startswith("aten::")
            and schema.name not in of_scripts
            and any("Generator" in str(argument.type) for argument in schema.arguments)
        ):
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
            op = getattr(packet, schema.overload_name or "default")
            if torch.Tag.nondeterministic_seeded not in op.tags:
                untagged.append(str(op))
    assert untagged == []


def test_initial_values_are_made_anew() -> None:
    initial = initial_of(nn.Linear(3, 3))
    initial["bias"].fill_(9.0)
    assert not (initial["bias"] == 9.0).any()
    changed = initial.but({"bias": torch.full((3,), 2.0, dtype=torch.float64)})
    assert changed["bias"].tolist() == [2.0] * 3
    assert changed["bias"].dtype == torch.float32
