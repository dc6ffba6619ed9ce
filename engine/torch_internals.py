"""Every name of torch that is not public and that flowrun relies on, once.

Grouped by subsystem; each line says what is relied on, and tests/engine/test_torch_internals.py
holds torch to it.  What takes long to import is imported where it is called: Dynamo, AOTAutograd
and Inductor take two seconds.  Names of private ops in the tables of engine/ops are text, and their
rows are proved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._ops import HigherOrderOperator as HigherOrderOperator  # an op that takes functions
from torch._ops import OpOverload as OpOverload  # str() is "aten.mm.default", as in Op.target
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # shapes, no numbers
from torch.nn.modules import batchnorm, transformer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten  # leaves in the order of arguments
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_unflatten as tree_unflatten

if TYPE_CHECKING:
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables.base import VariableTracker
    from torch._functorch._aot_autograd.schemas import JointWithDescriptors

aten = torch.ops.aten
without_modes = _disable_current_modes  # within, no dispatch mode sees an op

# ---- ops -----------------------------------------------------------------------------------------


def schema_of(op: Any) -> Any:
    """Return an op's schema: types and `alias_info` of `arguments` and `returns`, `is_mutable`."""
    return op._schema


assert_async = torch._assert_async  # raises on a CPU at once, on CUDA when the device comes to it

# They update lists of tensors in place, and do nothing where `found_inf` is 1.
fused_adamw = torch._fused_adamw_
fused_sgd = torch._fused_sgd_

# (loss, log alpha) of each sample, by lengths that are lists; alpha's last dim is as long as the
# longest target needs.
ctc_loss = aten._ctc_loss.default
ctc_loss_backward = aten._ctc_loss_backward.default

# ---- attention: a kernel returns (output, logsumexp of scores, …), a gradient those of q, k, v ---

cpu_attention = aten._scaled_dot_product_flash_attention_for_cpu.default
cpu_attention_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# On CUDA; gradients read the output as (samples, queries, heads, width) in memory.  cuDNN's results
# have the strides of FlashAttention's.
cudnn_attention = aten._scaled_dot_product_cudnn_attention.default
cudnn_attention_backward = aten._scaled_dot_product_cudnn_attention_backward.default
flash_attention = aten._scaled_dot_product_flash_attention.default
flash_attention_backward = aten._scaled_dot_product_flash_attention_backward.default
efficient_attention = aten._scaled_dot_product_efficient_attention.default
efficient_attention_backward = aten._scaled_dot_product_efficient_attention_backward.default
# Of documents in one list of tokens: logsumexp is FlashAttention's (heads, tokens), the efficient
# kernel's (documents, heads, longest document rounded up to 32).
flash_attention_of_list = aten._flash_attention_forward.default
flash_attention_of_list_backward = aten._flash_attention_backward.default
efficient_attention_of_list = aten._efficient_attention_forward.default
efficient_attention_of_list_backward = aten._efficient_attention_backward.default
FLASH_3 = "flash_attn_interface"  # the module that registers it, of the package flash_attn_3


def flash_attention_3_of_list() -> Sequence[Callable[..., tuple[Tensor, ...]]]:
    """Import FlashAttention 3, and return its kernel and gradient of documents in one list:
    (query, key, value, starts of queries, of keys, most queries, most keys, scale, causal, window
    to the left, to the right, …) and (grad, query, key, value, out, logsumexp, starts, …).

    What torch makes public, activate_flash_attention_impl, takes the place of all its
    FlashAttention, whose results then lie otherwise in memory than compiled regions expect.
    """
    from torch.nn.attention import _fa3

    _fa3._fa3_import_module(FLASH_3)
    return _fa3._fa3_run_forward, _fa3._fa3_run_backward


# The number of the SDPBackend that scaled_dot_product_attention would choose.
choose_attention = torch._fused_sdp_choice


@cache
def onednn_linear() -> OpOverload:
    """Return oneDNN's product (x, weight (n, k), bias, "none", [], None); it is registered where
    torch.backends.mkldnn.is_available().
    """
    op: OpOverload = torch.ops.mkldnn._linear_pointwise.default
    return op


# The product of 8 bits: (a (m, k), b (k, n), scales (m, 1) and (1, n), or (1, 1) each, out_dtype=).
scaled_mm = aten._scaled_mm.default


# ---- storages ------------------------------------------------------------------------------------


def ring_attention(balanced: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Import torch's attention around a ring of ranks, and its gradient: (group, dim of the length,
    kernel, its tensors, causal, more of the kernel's arguments).

    balanced: each rank has the piece of the head and of the tail that are its number from the ends.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    ring._cp_options.enable_load_balance = balanced
    return ring._templated_ring_attention, ring._templated_ring_attention_backward


def storage_id(of: Tensor | torch.UntypedStorage) -> int:
    """Return a number that tensors of one storage share, and no two living storages."""
    storage = of.untyped_storage() if isinstance(of, Tensor) else of
    number: int = storage._cdata
    return number


def storage_without_memory(num_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return a storage that has a size and a null pointer: nothing may read it."""
    make: Any = torch._C._construct_storage_from_data_pointer
    storage: torch.UntypedStorage = make(0, device, num_bytes)
    return storage


def has_memory(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor can be read; not those of one that wraps another."""
    with suppress(RuntimeError):
        return tensor.untyped_storage().data_ptr() != 0
    return False


def version_of(tensor: Tensor) -> int:
    """Return a number that grows with each write into the tensor."""
    return tensor._version


# ---- modules: dicts that are what the attributes are looked up in --------------------------------


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own parameters by attribute."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the module's own buffers by attribute."""
    return module._buffers


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the module's own parts by attribute."""
    return module._modules


def set_submodules(module: nn.Module, parts: Mapping[str, nn.Module | None]) -> None:
    """Give a module other parts; a copy.copy of it keeps its own."""
    module._modules = dict(parts)


WRAPPERS = nn.DataParallel, nn.parallel.DistributedDataParallel


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return the module inside one of WRAPPERS or torch.compile's OptimizedModule; else None."""
    if type(module).__name__ == "OptimizedModule":
        return module._orig_mod  # type: ignore[return-value]
    return module.module if isinstance(module, WRAPPERS) else None


def gradient_hooks(tensor: Tensor) -> dict[int, Callable[..., Any]]:
    """Return what Tensor.register_hook has registered."""
    return tensor._backward_hooks or {}


def accumulation_hooks(tensor: Tensor) -> dict[int, Callable[..., object]]:
    """Return what register_post_accumulate_grad_hook has registered."""
    return getattr(tensor, "_post_accumulate_grad_hooks", None) or {}


def module_backward_hooks(module: nn.Module) -> dict[int, Callable[..., object]]:
    """Return the hooks on a module's backward, or else those before it."""
    return module._backward_hooks or module._backward_pre_hooks


BatchNorm = batchnorm._BatchNorm  # the base of all of them
BUFFER_MARK = "_is_buffer"  # nn.Buffer sets it on its tensor
# (transformer, name) looks at a mask's values: is it the causal one?
CAUSAL_MASK_DETECTOR = (transformer, "_detect_is_causal_mask")


# ---- dispatch ------------------------------------------------------------------------------------


class DispatchMode(TorchDispatchMode):
    """A mode whose __torch_dispatch__ sees every op."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Answer torch: True would import the compiler in the first op of a rank, for 0.8 s."""
        return False


def is_dispatched() -> bool:
    """Return whether this thread is under a dispatch mode."""
    return bool(torch._C._len_torch_dispatch_stack())


@contextmanager
def compiling() -> Iterator[None]:
    """Within, torch says that it compiles: optimizers then compute with tensors of one number."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def is_of_fake_tensors(error: BaseException) -> bool:
    """Return whether an error says what fake tensors cannot do: the real call has values."""
    left = "FunctionalTensor on its own" in str(error)  # by a trace, in what forward holds
    return left or type(error).__module__.startswith("torch._subclasses")


def asks_for_values(error: BaseException) -> bool:
    """Return whether an error says that a tensor without values was asked for them."""
    fake = type(error).__name__ == "DataDependentOutputException"
    return fake or "get value out of a tracing tensor" in str(error)


# ---- Dynamo and AOTAutograd: capture -------------------------------------------------------------


def import_tracer() -> None:
    """Import what `trace_forward` and `trace_joint` use.

    A process that forks others to capture calls this first, so that it is done once.
    """
    import torch._dynamo.functional_export
    import torch._functorch.aot_autograd  # noqa: F401


def trace_forward(program: nn.Module, values: Sequence[Tensor]) -> torch.fx.GraphModule:
    """Return the FX graph of a module's forward, with effects in Python left out.

    Its graph's `process_inputs(*values)` returns what its placeholders stand for.
    """
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    torch._dynamo.reset()
    traced: torch.fx.GraphModule = dynamo_graph_capture_for_export(program)(*values)
    return traced


def trace_joint(
    stack: ExitStack, traced: nn.Module, values: Sequence[Tensor]
) -> JointWithDescriptors:
    """Return one functional ATen graph (`graph_module`) of forward and backward, whose placeholders
    and outputs carry descriptors.

    stack: closed when the graph has been read.  traced: of trace_forward.  values: its inputs.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    node_meta().clear()  # a trace that an error ended may have left a module there
    return aot_export_joint_with_descriptors(stack, traced, tuple(values))


def node_meta() -> dict[str, Any]:
    """Return what torch writes into `meta` of each node that it makes: "nn_module_stack", whose
    values begin with a module's path, and "stack_trace".
    """
    meta: dict[str, Any] = torch.fx.traceback.get_current_meta()
    return meta


def is_traced(value: object) -> bool:
    """Return whether a tensor stands for one of a graph that is being made."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(value, FakeTensor | FunctionalTensor)


# (module, name) steps before and after the function that is checkpointed without reentrance; torch
# 2.14 keeps the older name for those who call it by position
_STEPS = "_checkpoint_without_reentrant_generator"
_IS_2_14 = hasattr(torch.utils.checkpoint, f"{_STEPS}_impl")
CHECKPOINT_STEPS = (torch.utils.checkpoint, f"{_STEPS}_impl" if _IS_2_14 else _STEPS)
MODULE_CALL = nn.Module._call_impl.__code__  # a frame of it has the module as `self`


def mark_parameters(modules: Collection[nn.Module]) -> None:
    """Let isinstance(…, nn.Parameter) hold for what stands in for the parameters of modules."""
    for weight in (weight for each in modules for weight in each.parameters(recurse=False)):
        weight._is_param = True


def dynamo_settings(wanted: Mapping[str, object]) -> AbstractContextManager[None]:
    """Within, Dynamo has these settings; those that this release lacks are left out."""
    config: Any = torch._dynamo.config
    return config.patch({key: x for key, x in wanted.items() if hasattr(config, key)})  # type: ignore[no-any-return]


def leaf_check() -> tuple[object, str] | None:
    """Return (class, method) that refuses requires_grad_() in forward; None: this release lacks
    it.
    """
    name = "_check_requires_grad_intermediate_outputs"
    owner = torch._dynamo.output_graph.OutputGraph
    return (owner, name) if hasattr(owner, name) else None


def random_support() -> tuple[object, str]:
    """Return (class, static method) that names functions of `random` whose numbers Dynamo takes as
    inputs of its graph, which are constants once it is exported.
    """
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    return UserDefinedObjectVariable, "_supported_random_functions"


def random_generators() -> tuple[object, str]:
    """Return (class, static method) that says of which generators of `random` Dynamo takes numbers;
    from torch 2.14 on `random`'s own is one.
    """
    from torch._dynamo.variables.misc import RandomVariable

    return RandomVariable, "is_supported_random_obj"


def side_effects() -> type[SideEffects]:
    """Return Dynamo's class of what forward changes in Python: `codegen_update_mutated` is called
    once; `keepalive` has the objects, `id_to_variable` their variables, `store_attr_mutations` the
    attributes.
    """
    from torch._dynamo.side_effects import SideEffects

    return SideEffects


def modified_variables(effects: SideEffects) -> Sequence[VariableTracker]:
    """Return the variables (with a `source`) of objects that forward changed."""
    return effects._get_modified_vars()


def forget_triton() -> None:
    """Clear the answers that torch keeps to "is Triton there?", asked while GPUs are hidden."""
    import torch.utils._triton

    for cached in vars(torch.utils._triton).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


# ---- Inductor ------------------------------------------------------------------------------------


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Within, torch's own imports warn of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the ops that Inductor does not know, each with how to write it."""
    with _quiet_imports():
        from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def inductor_config() -> ModuleType:
    """Return Inductor's settings by their names, with dots: `get_config_copy()`; `patch(settings)`
    sets them within a block.
    """
    with _quiet_imports():
        from torch._inductor import config

    return config


def build_graph(
    module: torch.fx.GraphModule, examples: Sequence[Tensor], mode: FakeTensorMode
) -> tuple[Callable[[list[Tensor]], Sequence[Tensor]], tuple[tuple[int, ...], ...]]:
    """Build a functional ATen graph; return a function that takes a list and empties it, and the
    strides of its results, which Inductor pads on CUDA.

    module: the graph.  examples: fake inputs.  mode: theirs, with a ShapeEnv.
    """
    with _quiet_imports():
        from torch._functorch.compile_utils import fx_graph_cse
        from torch._guards import TracingContext, tracing
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes
        from torch._inductor.virtualized import V
    with (
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),  # the cache on disk asks for it
        TracingContext.report_output_strides() as reported,
    ):
        module.graph = fx_graph_cse(module.graph)
        built: Any = compile_fx_inner(joint_graph_passes(module), examples, is_inference=True)
    strides = tuple(tuple(stride) for stride in reported or () if stride is not None)
    return built.current_callable, strides


def missing_compiler() -> Exception | None:
    """Return why Inductor has no C++ compiler; None if it has one."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return error
    return None


def inductor_cache() -> str:
    """Return the folder of Inductor's cache; TORCHINDUCTOR_CACHE_DIR moves it."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def set_donated_buffer(donated: bool) -> None:
    """Say whether code built from now on may reuse memory of saved tensors: then backward runs
    once.
    """
    from torch._functorch import config

    config.donated_buffer = donated
