"""Private parts of torch: what a module holds and loads, a running backward, memory and writes of tensors,
operations, modes and named ranges.

Read in torch 2.11, 2.13, 2.14 and 2.15.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._subclasses import fake_tensor
from torch.autograd import Variable, forward_ad, profiler
from torch.utils import _python_dispatch, _pytree, checkpoint

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
MOVE_MODULE: CodeType = nn.Module._apply.__code__  # type: ignore[attr-defined]
"""The code of `module.to`, which goes through the parameters and their gradients."""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of a module by name, without those of its children. None where it has none under a known name."""
    return module._parameters


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children of a module by name, also one that has two names."""
    return module._modules


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module by name, without those of its children."""
    return module._buffers


def own_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Each parameter and buffer in `module`, behind the mapping that has it and its name there."""
    for part in module.modules():
        for held in (own_parameters(part), own_buffers(part)):
            yield from ((held, name, tensor) for name, tensor in held.items() if tensor is not None)


PLAIN_DATA: Any = Tensor.data
"""`.data` of torch: a run puts its own in this place (`watched_data`)."""


def version_of(tensor: Tensor) -> int:
    """The number of writes to a tensor that torch counts. One of inference mode has none."""
    return tensor._version


def of_graph(tensor: Tensor) -> bool:
    """True for a view of what an operation has computed with a gradient."""
    return tensor._base is not None and tensor._base.grad_fn is not None


def grad_hooks(parameter: Tensor, *, late: bool = False) -> Mapping[int, Any]:
    """The hooks on the gradient of a parameter by their numbers, or those that come `late`, after its accumulation."""
    return getattr(parameter, HOOKS[late], None) or {}


def memory_key(tensor: Tensor) -> int:
    """A number for the memory that a tensor and its views share."""
    return tensor.untyped_storage()._cdata


def running_backward() -> int:
    """The number of the backward that autograd runs on this thread, -1 without one."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    return running_backward() != -1


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have the running backward end with `call`."""
    Variable._execution_engine.queue_callback(call)


def in_checkpoint() -> bool:
    """Return True while the forward of a region of `torch.utils.checkpoint` runs on this thread, or runs again."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__name__


def in_transform() -> bool:
    """Return True inside a transform of `torch.func`, or a level of derivatives in forward mode."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def outside_transforms() -> AbstractContextManager[Any]:
    return temporarily_clear_interpreter_stack() if torch._C._are_functorch_transforms_active() else nullcontext()


def has_memory(tensor: Tensor) -> bool:
    """Return False for a tensor that a transform of `torch.func`, or `is_grads_batched`, has put around another one."""
    wrappers = torch._C._functorch
    return not (wrappers.is_functorch_wrapped_tensor(tensor) or wrappers.is_legacy_batchedtensor(tensor))


def same_version(tensor: Tensor) -> Tensor:
    """Return an alias of `tensor` without a graph, which counts the same writes, also below autograd."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def is_memory_shared(memory: torch.UntypedStorage, among: int = 1) -> bool:
    """Return True where more tensors than `among` use `memory`, which has a reference of its own."""
    return torch._C._storage_Use_Count(memory._cdata) > among + 1  # type: ignore[attr-defined]


def uncompiled_code(function: Any) -> CodeType:
    """The code of a function. From now on dynamo follows neither it, between graphs, nor what it calls."""
    code, skip = function.__code__, eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    return code


def is_compiled(module: nn.Module) -> bool:
    """Return True if torch compiles this module: `torch.compile(module)` or `module.compile()`."""
    wrapped = type(module).__name__ == "OptimizedModule"  # its home, torch._dynamo, takes a second to import
    return wrapped or is_compiled_in_place(module)


def uncompiled(module: nn.Module) -> AbstractContextManager[Any]:
    """Run compiled modules in `module` uncompiled inside.

    A mode that intercepts operations would make torch give up to compile what runs inside, for good.
    """
    return torch.compiler.set_stance("force_eager") if any(map(is_compiled, module.modules())) else nullcontext()


def in_wrapper(module: nn.Module) -> nn.Module | None:
    """Return the module that `torch.compile(module)` wrapped. None for what it did not return."""
    return getattr(module, "_orig_mod", None)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return True after `module.compile()`, which compiles the module with its hooks."""
    return module._compiled_call_impl is not None


_DICTS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


@contextmanager
def restored_hooks(module: nn.Module) -> Iterator[None]:
    """Remove the hooks that the code inside registers, and put back those that it removes.

    Libraries register hooks at the first call and note it in an attribute. Transformers does so for hidden states.
    """
    dicts = [getattr(each, name) for each in module.modules() for name in _DICTS]
    before = [list(hooks.items()) for hooks in dicts]
    try:
        yield
    finally:
        for hooks, items in zip(dicts, before, strict=True):
            if list(hooks.items()) != items:
                hooks.clear()
                hooks.update(items)


def forward_hooks(module: nn.Module) -> Any:
    """The hooks that get results, by their numbers."""
    return module._forward_hooks


def forward_pre_hooks(module: nn.Module) -> Any:
    """The hooks that get arguments, by their numbers."""
    return module._forward_pre_hooks


def backward_hooks(module: nn.Module) -> tuple[Mapping[int, object], ...]:
    """The hooks, now and later, that get gradients of inputs or results."""
    return module._backward_hooks, module._backward_pre_hooks


TorchDispatchMode = _python_dispatch.TorchDispatchMode
without_modes = _python_dispatch._disable_current_modes
FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode
tree_leaves, tree_map, tree_map_only = _pytree.tree_leaves, _pytree.tree_map, _pytree.tree_map_only
no_functions, no_subclasses = torch._C.DisableTorchFunction, torch._C.DisableTorchFunctionSubclass
ATEN = torch.ops.aten
no_torch_function: Any = torch._C._disabled_torch_function_impl
"""A `__torch_function__` that does nothing."""
UNKNOWN = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
"""Errors of tensors without values where a result depends on values."""
READ, CAST, ANY_TRUE = ATEN._local_scalar_dense.default, ATEN._to_copy.default, ATEN._is_any_true.default
RESHAPED, GROUPED = ATEN._unsafe_view.default, ATEN._grouped_mm
ATTENTION = (
    (ATEN._scaled_dot_product_flash_attention, ATEN._scaled_dot_product_flash_attention_backward),
    (ATEN._scaled_dot_product_efficient_attention, ATEN._scaled_dot_product_efficient_attention_backward),
    (ATEN._scaled_dot_product_cudnn_attention, ATEN._scaled_dot_product_cudnn_attention_backward),
    (ATEN._scaled_dot_product_flash_attention_for_cpu, ATEN._scaled_dot_product_flash_attention_for_cpu_backward),
)
"""Kernels, each with that of its backward."""
PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "convolution", "_grouped_mm", "_scaled_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward",
)  # fmt: skip
"""Operations that cost most. A version of torch may lack some."""
schema: Callable[[Any], Any] = attrgetter("_schema")
"""The types of the arguments and results of an operation, and which of them it writes to."""
overloads: Callable[[Any], Any] = attrgetter("_overloadpacket")
"""The function that an operation is one overload of."""


def is_faking() -> bool:
    """Return True where a mode makes tensors without values."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


_NO_RANGE: AbstractContextManager[None] = nullcontext()


def named_range(name: str) -> AbstractContextManager[None]:
    """A named range in a trace of torch's profiler, as long as the context lasts. Without a profiler, nothing."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NO_RANGE


_LOAD_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_BY_NAME = ("lightning_3d.", "torch.distributed.", "torch.nn.modules.", "torchmetrics.")
"""Packages whose code takes each tensor by itself, so that it does not matter which others are there."""


def loads_by_name(module: nn.Module) -> bool:
    """Return True where no code of the user is called when `module` and its children load a state."""
    code: list[Any] = [type(module).load_state_dict]
    for each in module.modules():
        code += [
            type(each)._load_from_state_dict,
            *(hook for hooks in _LOAD_HOOKS for hook in vars(each)[hooks].values()),
        ]
    return all((getattr(each, "__module__", None) or "").startswith(_BY_NAME) for each in code)


def copies_parameters(owner: nn.Module) -> bool:
    """Return True where `owner` copies a state to its own parameters as it is."""
    return type(owner)._load_from_state_dict is nn.Module._load_from_state_dict


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a state by name, without the hooks of `state_dict`."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, buffer in owner.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                yield name, buffer
