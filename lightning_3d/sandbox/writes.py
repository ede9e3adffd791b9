"""Rules about weights: those that code reads, and those that it changes in place (a target network, clamped weights).

A run of the step ahead of training must leave the weights as they are. A step with ZeRO computes with copies of
weights, so a change would be lost. A pipeline runs the step once for each microbatch, so a change would be made twice.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.errors import GivenArrays, WritesError, hooks_around, module_of
from lightning_3d.layout import Layout
from lightning_3d.module.torch_private import of_graph, tree_leaves, uncompiled_code
from lightning_3d.module.undo import replaced_attributes
from lightning_3d.ranks.dtensor_private import own_memory
from lightning_3d.sandbox.interceptor import FOR_CALLER, Call, Interceptor, Rule, is_itself, shares_memory, storage

_INSIDE = ("lightning_3d.", "torch.distributed.", "torch._")
Named = Callable[[], Iterator[tuple[str, Tensor]]]
"""Gives parameters by name. Asked at each write: a module's parameters may change within a step."""


@contextmanager
def writes_undone(module: nn.Module) -> Iterator[None]:
    """Restore parameters that the code inside changes in place. Only those are copied."""
    rule = UndoWrites(module.named_parameters)
    try:
        with Interceptor(rule):
            yield
    finally:
        with torch.no_grad():
            for parameter, value in rule.values.items():
                parameter.copy_(value)


class UndoWrites(Rule):
    """Copy each parameter before the first call that may change it, directly, by a view or by `.data`."""

    def __init__(self, named: Named) -> None:
        self.named = named
        self.values: dict[Tensor, Tensor] = {}

    def before(self, call: Call) -> Call:
        for _, parameter in owners_of(self.named, [tensor for tensor, _ in call.targets]):
            if parameter not in self.values:
                self.values[parameter] = parameter.detach().clone()
        return call


class RefuseWrites(Rule):
    """Refuse calls that change parameters, directly, by a view or by `.data`, since `why`."""

    def __init__(self, named: Named, why: str) -> None:
        self.named, self.why = named, why

    def after(self, call: Call, result: Any) -> None:
        for name, _ in owners_of(self.named, call.written()):
            raise step_writes(name, self.why)


IN_SHARDS = (
    "of which ranks have shards: these keep their dtype and shape, and the backward would compute with the new values"
)


def watched_data(note: Callable[[Tensor, Tensor], None], check: Callable[[Tensor, Tensor], None]) -> property:
    """A `.data` for tensors. Assigned to a shard it reaches it: torch sets an attribute that nothing reads.

    `note` takes a tensor and the `.data` that code gets. That counts writes to itself, the tensor does not.
    `check` takes a tensor and the value; it raises where the tensor must not change now.
    """
    plain: Any = Tensor.data  # torch gives its functions that of this class, whatever the tensor
    given: dict[int, list[ReferenceType[DTensor]]] = {}
    """What code has got of shards, by the id of each: a weak reference to a shard would keep torch from swapping it.
    It keeps its values where another `.data` is assigned."""

    def get(tensor: Tensor) -> Tensor:
        shared, data = shares_memory(tensor) and not of_graph(tensor), plain.__get__(tensor)
        if shared:  # before: a view of a weight, not a buffer, nor one of an activation
            note(tensor, data)
        if isinstance(data, DTensor):
            given[id(tensor)] = [ref(data), *(each for each in given.get(id(tensor), ()) if each() is not None)]
        return data

    def assign(tensor: Tensor, value: Tensor) -> None:
        own = tensor.is_meta or value.is_meta or is_itself((tensor, value))
        if not own:
            check(tensor, value)
        if own or not isinstance(tensor, DTensor) or not fits(tensor, value):
            plain.__set__(tensor, value)
        else:
            with torch.no_grad():
                for data in (each() for each in given.pop(id(tensor), ())):
                    if data is not None:
                        own_memory(data)
                tensor.copy_(value)

    FOR_CALLER.update(map(uncompiled_code, (get, assign)))
    return property(get, assign)


def grad_of_shards(gathered: Callable[[], Iterable[tuple[Tensor, Tensor]]], in_step: Callable[[], Any]) -> property:
    """A `.grad` for parameters that were gathered: a backward leaves the gradient at the shard.

    Code that lists parameters at the start of a step would find none, and `zero_grad` would leave those of before.
    """
    plain: Any = Tensor.grad
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def holder(tensor: Tensor) -> Tensor:
        # these move gradients to the shards, or compile a block that has plain parameters
        inside = module_of(sys._getframe(2)).startswith(_INSIDE)
        if inside or not in_step() or plain.__get__(tensor) is not None:
            return tensor
        if id(tensor) not in known:
            known.update((id(pair[0]), pair) for pair in gathered())
        return known.get(id(tensor), (tensor, tensor))[1]

    def get(tensor: Tensor) -> Any:
        return plain.__get__(holder(tensor))

    def assign(tensor: Tensor, value: Tensor | None) -> None:
        full = value is not None and not isinstance(value, DTensor)
        plain.__set__(holder(tensor), None if full else value)  # to a gradient of before the backward would add its own
        if full:
            plain.__set__(tensor, value)

    FOR_CALLER.update(map(uncompiled_code, (holder, get, assign)))
    return property(get, assign, plain.__delete__)


def watched_arrays(copied: Callable[[Tensor], bool]) -> dict[str, Callable[..., Any]]:
    """Methods for tensors, which give a copy that refuses writes where `copied` is true: they would be lost."""
    plain: Any = Tensor.numpy

    def numpy(tensor: Tensor, **options: Any) -> Any:
        lost = copied(tensor)
        # torch frees no memory of a gathered weight that numpy has seen; of a shard it gives the full tensor's
        array = plain(tensor.clone() if lost and not isinstance(tensor, DTensor) else tensor, **options)
        if lost:
            array.flags.writeable = False
            GivenArrays.read_only = True
        return array

    def array(tensor: Tensor, dtype: Any = None, copy: bool | None = None) -> Any:
        found: Any = tensor.numpy()
        return found.astype(found.dtype if dtype is None else dtype, copy=bool(copy))

    FOR_CALLER.update(map(uncompiled_code, (numpy, array)))
    return {"numpy": numpy, "__array__": array}


def fits(tensor: Tensor, value: Tensor) -> bool:
    return (tensor.shape, tensor.dtype) == (value.shape, value.dtype)


def step_writes(name: str, why: str) -> WritesError:
    return WritesError(
        f"The step changes {name!r} in place (a target network that follows, clamped weights?), {why}. Do so in"
        " on_train_batch_start or on_train_batch_end; around an evaluation step in on_validation_batch_start or"
        " on_validation_batch_end (test, predict). What the first batch sets (ActNorm): call the module before fit."
    )


@contextmanager
def loads_refused(module: nn.Module, step: str, layout: Layout) -> Iterator[None]:
    """Refuse `load_state_dict` of what has parameters of `module`, in an evaluation step. ZeRO 3 can do it."""

    def load(owner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        known = set(module.parameters())
        if any(parameter in known for parameter in owner.parameters()):
            raise WritesError(
                f"{step} calls load_state_dict of {type(owner).__name__}: it computes with gathered copies of weights,"
                " or with those of one stage, which would keep the old values, or wait for other ranks. Do so in"
                f" {hooks_around(step)}."
            )
        return plain(owner, *args, **kwargs)

    plain = nn.Module.load_state_dict
    lost = layout.pipelined or (layout.shards_data and layout.zero_stage < 3)
    with replaced_attributes(nn.Module, load_state_dict=load) if lost else nullcontext():
        yield


def replaced(name: str) -> WritesError:
    return WritesError(
        f"training_step, or a hook, puts another parameter in the place of {name!r} (a new nn.Parameter, or"
        " torch.func.functional_call). Optimizers, shards and stages have the first one, so the other would be lost."
        " Make it a buffer with register_buffer, or use zero_stage=0 with data ranks alone."
    )


def gradient_set(name: str) -> WritesError:
    return WritesError(
        f"The gradient of {name} is on a gathered copy of the weight: training_step set it (torch.autograd.grad,"
        " p.grad = ...), or called loss.backward() where the loss has derivatives in it or an error ended the backward."
        " The shard, which the optimizer has, would not get it. Call manual_backward, and change p.grad after it; or"
        " use zero_stage=0, and average such gradients over data ranks by strategy.reduce(gradient)."
    )


def check_places(module: nn.Module, known: Mapping[str, int]) -> None:
    """Raise where a parameter is another one than in `known`, which has ids by name."""
    for name, item in module.named_parameters():
        if known.get(name, id(item)) != id(item):
            raise replaced(name)


def owners_of(named: Named, tensors: list[Tensor]) -> list[tuple[str, Tensor]]:
    """The parameters that share their memory with `tensors`."""
    tensors = [tensor for tensor in tensors if shares_memory(tensor)]  # a search through all parameters takes longer
    if not tensors:
        return []
    owners = defaultdict[int, list[tuple[str, Tensor]]](list)
    for name, parameter in named():
        owners[storage(parameter)].append((name, parameter))
    return [owner for tensor in tensors for owner in owners.get(storage(tensor), ())]


class NoteReads(Rule):
    """Note parameters whose values a call reads, where it `counts`. A call for shape, dtype or device does not."""

    def __init__(
        self, names: Mapping[nn.Parameter, Sequence[str]], counts: Callable[[nn.Parameter, Any], bool]
    ) -> None:
        self.names, self.counts = names, counts
        self.found: dict[str, None] = {}
        """Names, in the order of the first reads."""

    def after(self, call: Call, result: Any) -> None:
        if call.name != "__setitem__" and not any(isinstance(leaf, Tensor | float) for leaf in tree_leaves(result)):
            return
        for leaf in call.tensors():
            if isinstance(leaf, nn.Parameter) and leaf in self.names and self.counts(leaf, call.func):
                self.found.update(dict.fromkeys(self.names[leaf]))
