"""torch_internals: what flowrun relies on of torch beyond its public names, each held to it.

Where a new torch breaks one of these, engine/torch_internals.py must follow, and nothing else.
What the joint graph carries stands in tests/engine/capture/test_capture.py, what CUDA's kernels
compute in tests/engine/runtime/test_cuda.py.
"""

import ast
import contextlib
import copy
import inspect
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from flowrun.engine import torch_internals as internals
from flowrun.launcher.model.replay import Geometry

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
aten = torch.ops.aten
PRIVATE = re.compile(r"torch(\.\w+)*\._[a-z]")  # in an import, or in an expression


def heads(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape, generator=draw) for _ in range(3))
    return query, key, value


def names_of(op: Any) -> list[str]:
    return [each.name for each in internals.schema_of(op).arguments]


# ---- that they stand here alone, each with its test ----------------------------------------------


def test_no_other_file_imports_a_private_module_of_torch() -> None:
    files = [
        f for top in ("engine", "launcher", "models", "testing") for f in (ROOT / top).rglob("*.py")
    ]
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(file.name, name) for name in names if PRIVATE.match(name)]
    assert {file for file, _ in found} == {"torch_internals.py"}


def test_every_name_is_tested() -> None:
    tree = ast.parse(inspect.getsource(internals))
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
            own |= {alias.asname for alias in node.names if alias.asname}
    tests = Path(__file__).read_text()
    public = {name for name in own - {"aten"} if not name.startswith("_")}
    assert {name for name in public if not re.search(rf"internals\.{name}\b", tests)} == set()


# ---- optimizers ----------------------------------------------------------------------------------


def test_optimizers_compute_with_tensors_of_one_number_where_torch_compiles() -> None:
    """RMSprop, for one, reads its step by .item() else, and takes `capturable` on a GPU alone."""
    weight = torch.ones(2)
    weight.grad = torch.ones(2)
    optimizer = torch.optim.RMSprop([weight], foreach=False, capturable=True)
    step = inspect.unwrap(torch.optim.RMSprop.step)
    with pytest.raises(AssertionError, match="capturable"), torch.no_grad():
        step(optimizer)
    with internals.compiling(), torch.no_grad():
        assert torch.compiler.is_compiling()
        step(optimizer)
    assert not torch.compiler.is_compiling()
    assert "step" in optimizer.state[weight] and bool((weight < 1).all())


# ---- ops -----------------------------------------------------------------------------------------


def test_a_schema_says_what_is_returned_viewed_and_written() -> None:
    view, write = (internals.schema_of(op) for op in (aten.t.default, aten.add_.Tensor))
    assert [str(each.type) for each in view.returns] == ["Tensor"]
    assert not view.returns[0].alias_info.is_write and not view.is_mutable
    assert write.is_mutable and write.arguments[0].alias_info.is_write
    assert [each.name for each in write.arguments] == ["self", "other", "alpha"]


def test_an_op_prints_as_the_target_of_a_graph() -> None:
    assert isinstance(aten.mm.default, internals.OpOverload)
    assert str(aten.mm.default) == "aten.mm.default"
    assert isinstance(torch.cond, internals.HigherOrderOperator) or callable(torch.cond)
    assert isinstance(torch.ops.higher_order.cond, internals.HigherOrderOperator)


def test_an_assertion_raises_on_a_cpu_at_once() -> None:
    internals.assert_async(torch.tensor(True), "no")
    with pytest.raises(RuntimeError, match="out of range"):
        internals.assert_async(torch.tensor(False), "out of range")


def test_fused_updates_change_nothing_where_what_is_found_is_not_finite() -> None:
    for found in (0.0, 1.0):
        weight, other = torch.ones(3), torch.ones(3)
        given: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.0, "maximize": False}
        given |= {"found_inf": torch.tensor(found)}
        internals.fused_sgd(
            [weight], [torch.ones(3)], [], momentum=0.0, dampening=0.0, nesterov=False,
            is_first_step=False, **given
        )  # fmt: skip
        state = [[torch.zeros(3)], [torch.zeros(3)], [], [torch.tensor(1.0)]]
        internals.fused_adamw(
            [other],
            [torch.ones(3)],
            *state,
            beta1=0.9,
            beta2=0.99,
            eps=1e-8,
            amsgrad=False,
            **given,
        )
        assert bool((weight == 1.0).all()) == bool((other == 1.0).all()) == bool(found)


def test_losses_of_sequences_take_lengths_as_lists() -> None:
    scores = torch.randn(6, 2, 4, requires_grad=True)
    logs, targets = scores.log_softmax(-1), torch.tensor([[1, 2], [3, 0]])
    given = (logs, targets, [6, 5], [2, 1])
    loss, alpha = internals.ctc_loss(*given, 0, False)
    torch.testing.assert_close(loss, F.ctc_loss(*given, reduction="none"))
    assert alpha.shape == (2, 6, 2 * 2 + 1)
    (expected,) = torch.autograd.grad(F.ctc_loss(*given, reduction="sum"), logs)
    made = internals.ctc_loss_backward(torch.ones(2), *given, loss, alpha, 0, False)
    torch.testing.assert_close(made, expected)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_onednn_multiplies_with_the_rows_of_a_weight() -> None:
    x, weight, bias = torch.randn(5, 4), torch.randn(3, 4), torch.randn(3)
    made = internals.onednn_linear()(x, weight, bias, "none", [], None)
    torch.testing.assert_close(made, F.linear(x, weight, bias))


@pytest.mark.parametrize(("rows", "columns"), [(3, 5), (1, 1)])
def test_a_product_of_8_bits_scales_rows_or_all(rows: int, columns: int) -> None:
    a, b = torch.randn(3, 16).to(torch.float8_e5m2), torch.randn(5, 16).to(torch.float8_e4m3fn)
    scales = torch.rand(rows, 1), torch.rand(1, columns)
    made = internals.scaled_mm(a, b.t(), *scales, out_dtype=torch.float32)
    torch.testing.assert_close(made, a.float() @ b.float().t() * scales[0] * scales[1])


# ---- attention -----------------------------------------------------------------------------------


def test_a_cpus_attention_returns_the_logsumexp_and_its_gradient_reads_it() -> None:
    query, key, value = heads(2, 3, 5, 8)
    out, logsumexp = internals.cpu_attention(query, key, value, 0.0, True, scale=0.5)
    scores = (query @ key.mT * 0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(out, scores.softmax(-1) @ value)
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    whole = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.5)
    expected = torch.autograd.grad(whole, leaves, torch.ones_like(whole))
    given = (torch.ones_like(out), query, key, value, out, logsumexp)
    with torch.no_grad():
        made = internals.cpu_attention_backward(*given, 0.0, True, scale=0.5)
    torch.testing.assert_close(made, expected)


def test_a_ring_of_one_rank_attends_as_its_kernel(tmp_path: Path) -> None:
    """Of two ranks: tests/launcher/bench/peers/test_context.py."""
    given = heads(2, 3, 4, 8)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        forward, backward = internals.ring_attention(balanced=True)
        how = dist.group.WORLD, 2
        out, rows, *_ = forward(*how, internals.cpu_attention, *given, True, scale=0.5)
        kernel, ones = internals.cpu_attention_backward, torch.ones_like(out)
        named = {"dropout_p": 0.0, "scale": 0.5}
        made = backward(*how, kernel, ones, "grad_out", *given, out, rows, True, **named)
    finally:
        dist.destroy_process_group()
    expected = internals.cpu_attention(*given, 0.0, True, scale=0.5)
    torch.testing.assert_close((out, rows), tuple(expected))
    gradients = kernel(ones, *given, out, rows, 0.0, True, scale=0.5)
    torch.testing.assert_close(tuple(made[:3]), tuple(gradients))


@pytest.mark.parametrize(
    ("kernel", "gradient", "rows"),
    [
        (internals.cudnn_attention, internals.cudnn_attention_backward, None),
        (internals.flash_attention, internals.flash_attention_backward, (2, 3, 5)),
        (internals.efficient_attention, internals.efficient_attention_backward, (2, 3, 32)),
    ],
    ids=["cudnn", "flash", "efficient"],
)
def test_gpu_kernels_make_the_shapes_of_outputs_and_statistics(
    kernel: Any, gradient: Any, rows: tuple[int, ...] | None
) -> None:
    given = [x.to("meta", torch.bfloat16).transpose(1, 2) for x in heads(2, 5, 3, 8)]
    assert names_of(kernel)[:3] == ["query", "key", "value"]
    assert names_of(gradient)[1:4] == ["query", "key", "value"]
    assert "scale" in names_of(kernel) and "logsumexp" in names_of(gradient)
    if rows is None:  # it asks the device
        return
    more = (None, True) if kernel is internals.efficient_attention else ()
    out, logsumexp, *_ = kernel(*given, *more, 0.0, True)
    assert out.shape == given[0].shape and logsumexp.shape == rows


@pytest.mark.parametrize(
    "op",
    [
        internals.flash_attention_of_list,
        internals.flash_attention_of_list_backward,
        internals.efficient_attention_of_list,
        internals.efficient_attention_of_list_backward,
    ],
    ids=str,
)
def test_kernels_of_documents_take_where_each_begins(op: Any) -> None:
    assert {"cum_seq_q", "cu_seqlens_q"} & set(names_of(op))


def test_flash_attention_3_is_that_of_its_package() -> None:
    """What it is called with, tests/engine/runtime/kernels/test_packed_attention.py tries."""
    lacks = (ModuleNotFoundError, AttributeError)  # the package; torch before 2.13 that reads it
    with pytest.raises(lacks, match=f"{internals.FLASH_3}|_fa3_import_module"):
        internals.flash_attention_3_of_list()


def test_torch_says_which_attention_it_would_choose() -> None:
    query, key, value = heads(2, 3, 5, 8)
    choice = internals.choose_attention(query, key, value, None, 0.0, True)
    assert choice == SDPBackend.FLASH_ATTENTION.value


# ---- storages ------------------------------------------------------------------------------------


def test_views_share_the_number_of_their_storage() -> None:
    x, other = torch.ones(6), torch.ones(6)
    number = internals.storage_id(x)
    assert number == internals.storage_id(x[2:].view(2, 2))
    assert number == internals.storage_id(x.untyped_storage()) != internals.storage_id(other)


def test_a_storage_may_have_a_size_and_no_memory() -> None:
    storage = internals.storage_without_memory(4000, CPU)
    tensor = Geometry(torch.float32, (10, 100), (100, 1)).on(storage)
    assert tensor[3:5, ::2].shape == (2, 50)
    assert internals.storage_id(nn.Parameter(tensor).data) == internals.storage_id(storage)
    with pytest.raises(RuntimeError, match="unallocated"):
        tensor.tolist()


def test_what_wraps_another_tensor_has_no_memory() -> None:
    bare = Geometry(torch.float32, (2,), (1,)).on(internals.storage_without_memory(8, CPU))
    found = [internals.has_memory(x) for x in (torch.ones(2), bare)]
    del bare  # nothing may print it

    def look(x: Tensor) -> Tensor:
        found.append(internals.has_memory(x))
        return x

    torch.vmap(look)(torch.ones(2))
    assert found == [True, False, False]


def test_numbers_can_be_read_without_modes() -> None:
    with internals.FakeTensorMode(), internals.without_modes():
        assert torch.ones(2).tolist() == [1.0, 1.0]


def test_a_write_through_any_view_raises_the_version() -> None:
    x = torch.zeros(4)
    before = internals.version_of(x)
    x[1:].add_(1)
    assert internals.version_of(x) > before


# ---- modules -------------------------------------------------------------------------------------


def test_dicts_of_a_module_are_what_its_attributes_are() -> None:
    norm = nn.BatchNorm1d(3)
    assert internals.parameters_of(norm)["weight"] is norm.weight
    assert isinstance(norm, internals.BatchNorm)
    internals.buffers_of(norm)["running_mean"] = mean = torch.ones(3)
    assert norm.running_mean is mean


def test_a_copy_with_other_parts_leaves_the_module_its_own() -> None:
    whole = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    short = copy.copy(whole)
    internals.set_submodules(short, {"0": internals.submodules_of(whole)["0"]})
    assert (len(short), len(whole)) == (1, 2) and short[0] is whole[0]


def test_hooks_are_listed_by_what_they_hang_on() -> None:
    layer = nn.Linear(2, 2)
    assert not internals.gradient_hooks(layer.weight) and not internals.accumulation_hooks(
        layer.weight
    )
    hooks = [lambda *_: None for _ in range(4)]
    layer.weight.register_hook(hooks[0])
    layer.weight.register_post_accumulate_grad_hook(hooks[1])
    assert list(internals.gradient_hooks(layer.weight).values()) == hooks[:1]
    assert list(internals.accumulation_hooks(layer.weight).values()) == hooks[1:2]
    layer.register_full_backward_pre_hook(hooks[3])
    assert list(internals.module_backward_hooks(layer).values()) == hooks[3:]
    layer.register_full_backward_hook(hooks[2])
    assert list(internals.module_backward_hooks(layer).values()) == hooks[2:3]


def test_a_buffer_made_as_such_is_marked() -> None:
    assert getattr(nn.Buffer(torch.ones(1)), internals.BUFFER_MARK) is True


def test_a_transformer_asks_whether_its_mask_is_causal() -> None:
    owner, name = internals.CAUSAL_MASK_DETECTOR
    asked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda mask, *_: asked.append(mask) or False)
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8), 1, enable_nested_tensor=False
        )
        encoder(torch.ones(3, 2, 4), mask=torch.zeros(3, 3))
    assert asked


# ---- dispatch ------------------------------------------------------------------------------------


class Seen(internals.DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_every_op_and_is_seen() -> None:
    with Seen() as seen:
        assert internals.is_dispatched()
        torch.ones(2) + 1
    assert not internals.is_dispatched()
    assert seen.ops == ["aten.ones.default", "aten.add.Tensor"]


def test_fake_tensors_have_shapes_and_name_what_they_cannot_do() -> None:
    with internals.FakeTensorMode():
        x = torch.ones(3)
        assert x.shape == (3,)
        with pytest.raises(internals.DynamicOutputShapeException) as error:
            x.nonzero()
    assert internals.is_of_fake_tensors(error.value)
    assert not internals.is_of_fake_tensors(ValueError())


def test_a_graph_is_made_of_tensors_that_stand_in_and_says_where_its_nodes_come_from() -> None:
    seen = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(2, 2)

        def forward(self, x: Tensor) -> tuple[Tensor]:
            internals.mark_parameters([self.rnn])
            internals.node_meta().update(nn_module_stack={"": ("path", nn.RNN)}, stack_trace="me")
            seen.append((internals.is_traced(x), isinstance(self.rnn.weight_hh_l0, nn.Parameter)))
            frame = inspect.currentframe()
            assert frame is not None and frame.f_back is not None
            assert frame.f_back.f_code is internals.MODULE_CALL
            return (self.rnn(x)[0].sum(),)

    assert not internals.is_traced(torch.zeros(1))
    fake = internals.FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        x = fake.from_tensor(torch.ones(3, 2))
        graph = internals.trace_joint(stack, Net(), [x]).graph_module.graph
    assert set(seen) == {(True, True)}
    products = [node for node in graph.nodes if "addmm" in str(node.target)]
    assert products[0].meta["nn_module_stack"][""][0] == "path"
    assert products[0].stack_trace == "me"
    assert not [node for node in graph.nodes if node.op == "get_attr"]


def test_a_fake_tensor_that_is_asked_for_its_value_says_so() -> None:
    with internals.FakeTensorMode() as fake, pytest.raises(Exception) as error:
        fake.from_tensor(torch.ones(2)).sum().item()
    assert internals.asks_for_values(error.value)
    assert isinstance(fake.from_tensor(torch.ones(2)), internals.FakeTensor)


def test_a_checkpoint_steps_before_and_after_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*internals.CHECKPOINT_STEPS, lambda *_, **__: iter((None,)))
    x, calls = torch.ones(2, requires_grad=True), []

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin()

    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).sum().backward()
    assert calls == [1]


def test_leaves_come_in_the_order_of_arguments() -> None:
    tree = ((1, [2]), {"b": 3})
    leaves, spec = internals.tree_flatten(tree)
    assert leaves == internals.tree_leaves(tree) == [1, 2, 3]
    assert isinstance(spec, internals.TreeSpec)
    assert internals.tree_unflatten([4, 5, 6], spec) == ((4, [5]), {"b": 6})


# ---- Dynamo and AOTAutograd ----------------------------------------------------------------------


class Counts(nn.Module):
    """It changes itself in forward."""

    calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor]:
        self.calls += 1
        return ((x * 2).sum(),)


WARNED = pytest.mark.filterwarnings("ignore:While compiling")


@WARNED
def test_forward_and_backward_become_one_graph() -> None:
    internals.import_tracer()
    batch = torch.ones(3, requires_grad=True)
    with contextlib.ExitStack() as stack:
        traced = internals.trace_forward(Counts(), (batch,))
        assert [x.shape for x in traced.graph.process_inputs(batch)] == [(3,)]
        joint = internals.trace_joint(stack, traced, (batch,))
    targets = [str(n.target) for n in joint.graph_module.graph.nodes if n.op == "call_function"]
    assert targets[0] == "aten.mul.Tensor" and "aten.sum.default" in targets


@WARNED
def test_effects_in_python_are_listed_when_forward_has_been_traced() -> None:
    owner = internals.side_effects()
    whole, listed = owner.codegen_update_mutated, []
    program = Counts()

    def record(self: Any, *given: Any, **named: Any) -> Any:
        for variable in internals.modified_variables(self):
            number = next(k for k, each in self.id_to_variable.items() if each is variable)
            (changed,) = [each for each in self.keepalive if id(each) == number]
            listed.append((changed is program, list(self.store_attr_mutations.get(variable, {}))))
        return whole(self, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, "codegen_update_mutated", record)
        internals.trace_forward(program, (torch.ones(3),))
    assert (True, ["calls"]) in listed


def test_settings_that_a_release_lacks_are_left_out() -> None:
    from torch._dynamo import config

    before = config.allow_rnn
    with internals.dynamo_settings({"allow_rnn": not before, "unknown_to_all": 1}):
        assert config.allow_rnn is not before
    assert config.allow_rnn is before


def test_the_check_of_leaves_within_forward_is_a_method() -> None:
    check = internals.leaf_check()
    assert check is None or callable(getattr(*check))


def test_numbers_of_pythons_random_are_a_set_of_functions() -> None:
    owner, name = internals.random_support()
    assert random.random in getattr(owner, name)()


def test_generators_of_pythons_random_are_asked_for() -> None:
    owner, name = internals.random_generators()
    assert getattr(owner, name)(random.Random(0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports
@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_the_module_that_torch_wraps_is_found(wrap: Any) -> None:
    inner = nn.Linear(2, 2)
    assert internals.wrapped_module(wrap(inner)) is inner
    assert internals.wrapped_module(inner) is None
    assert isinstance(wrap(inner), internals.WRAPPERS) == (wrap is nn.DataParallel)


def test_what_torch_knows_of_triton_is_forgotten() -> None:
    import torch.utils._triton as triton

    triton.has_triton()
    assert triton.has_triton.cache_info().currsize
    internals.forget_triton()
    assert not triton.has_triton.cache_info().currsize


# ---- Inductor ------------------------------------------------------------------------------------


@pytest.mark.skipif(internals.missing_compiler() is not None, reason="no C++ compiler")
def test_a_graph_is_built_into_a_function_that_empties_its_list() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = internals.FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        examples = [torch.empty(3, 4)]
    table = internals.inductor_decompositions()
    assert aten.native_layer_norm.default in table or aten.gelu.default in table
    module = make_fx(lambda x: (x * 2 + 1,), decomposition_table=table)(*examples)
    with internals.inductor_config().patch({"compile_threads": 1}), torch.no_grad():
        run, strides = internals.build_graph(module, examples, mode)
    given = [torch.ones(3, 4)]
    assert run(given)[0].tolist() == [[3.0] * 4] * 3
    assert given == [] and strides == ((4, 1),)


def test_the_folder_of_what_is_built_moves_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert internals.inductor_cache() == str(tmp_path)


def test_memory_of_saved_tensors_may_be_kept() -> None:
    from torch._functorch import config

    with config.patch(donated_buffer=True):
        internals.set_donated_buffer(False)
        assert config.donated_buffer is False
