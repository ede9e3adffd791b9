"""The user's hooks between steps that compute with parameters: a target network that follows, clamped weights.

What they do with each element works on shards too. What torch would get wrong in silence there is done as it is meant,
or refused: parameters of other pipeline stages are on meta, and adding such a one to a real one changes nothing. See
`shards.py` for single operations.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import wraps
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_3d import peers
from lightning_3d.compose import Composed
from lightning_3d.errors import UnsupportedError
from lightning_3d.parted import is_absent
from lightning_3d.shards import Shards
from lightning_3d.writes import Insisting, assigns_data
from lightning_3d.zero.sync import DataParallel

HOOKS = (
    "on_fit_start",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_test_start",
    "on_test_epoch_start",
    "on_test_epoch_end",
    "on_test_end",
    "on_predict_start",
    "on_predict_epoch_start",
    "on_predict_epoch_end",
    "on_predict_end",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
)
_WITHIN = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
"""Those that belong to a backward: what is gathered for it has its gradients."""
_IN_WINDOWS = ("on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_validation_epoch_start")
"""Within a window of accumulation, letting go of weights would gather them once more, and hide their gradients."""
_GRAD: Any = Tensor.grad.__get__  # type: ignore[union-attr]
_TORCH = os.path.dirname(torch.__file__)
_IS_META: Any = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_READS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__format__")


def watch_hooks(
    module: LightningModule,
    callbacks: Sequence[Callback],
    composed: Callable[[], Composed | None],
    data: Callable[[], DataParallel],
) -> Callable[[], None]:
    """Run these hooks of the module and of the user's callbacks in `Between`; returns what undoes it.

    Args:
        module: the user's.
        callbacks: the Trainer's.
        composed: what was made of the module, by the time that a hook runs.
        data: lets go of weights that an evaluation or a window of accumulation keeps gathered: a hook would see those
            in place of what it saw before, and what it writes to them is lost.
    """
    watched = []
    for owner in (module, *callbacks):
        for name in HOOKS:
            hook = getattr(owner, name, None)  # those of the sanity check are of callbacks only
            if hook is None:
                continue
            if name not in owner.__dict__ and not hook.__module__.startswith(("lightning.", "lightning_3d.")):
                at = f"{type(owner).__name__}.{name}"
                owner.__dict__[name] = _watched(hook, at, module, composed, data)
                watched.append((owner, name))

    def undo() -> None:
        for owner, name in watched:
            owner.__dict__.pop(name, None)

    return undo


def _watched(
    hook: Callable[..., Any],
    name: str,
    module: LightningModule,
    composed: Callable[[], Composed | None],
    data: Callable[[], DataParallel],
) -> Callable[..., Any]:
    read: set[str] = set()
    kind = name.rpartition(".")[2]

    @wraps(hook)  # Lightning looks at what it takes
    def run(*args: Any, **kwargs: Any) -> Any:
        gathered = () if kind in _WITHIN else data().gathered()
        if gathered and kind not in _IN_WINDOWS:
            data().rest()
            gathered = ()
        before = [shard._version for _, shard in gathered]
        placed = composed()
        with Between(name, placed, read, gathered):
            result = hook(*args, **kwargs)
        if before != [shard._version for _, shard in gathered]:
            data().rest()  # what is gathered is out of date
        if placed is not None and placed.stages is not None:
            _refuse_absent_logs(name, module)
        return result

    return run


def _refuse_absent_logs(name: str, module: LightningModule) -> None:
    """What was logged of other stages' weights is read long after the hook, by Lightning."""
    logged = module._trainer._results if module._trainer is not None else None
    for key, metric in (logged or {}).items():
        if isinstance(metric.value, Tensor) and metric.value.is_meta:
            raise _absent(name, f"self.log({key.rpartition('.')[2]!r}, ...)")


def _absent(name: str, why: object) -> UnsupportedError:
    """What to raise where the hook `name` reads what is not on this rank."""
    return UnsupportedError(
        f"{name} reads numbers of a weight that another stage of the pipeline holds ({why}). Compute them in"
        " training_step, where what it logs is the same on every rank, or use pipeline_parallel_size=1; tensor"
        " parallelism and ZeRO can do this."
    )


class Between(Insisting):
    """Entered around a hook called `name` of a module that is `composed`.

    Args:
        name: for errors.
        composed: None before the module is placed.
        read: places in the code at which numbers were read from weights.
        gathered: parameters that are whole for now, with the shards that the hook is to see in their place.
    """

    def __init__(
        self,
        name: str,
        composed: Composed | None,
        read: set[str],
        gathered: Sequence[tuple[Tensor, nn.Parameter]] = (),
    ) -> None:
        super().__init__()
        self.shard_of = {id(whole): shard for whole, shard in gathered}
        self.name, self.read = name, read
        self.shards = None if composed is None else Shards(name, composed)
        self.one_stage = composed is not None and composed.stages is None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.shard_of and func != _GRAD:  # gradients of a window are where it is gathered
            args, kwargs = tree_map(lambda leaf: self.shard_of.get(id(leaf), leaf), (args, kwargs))
        if self.one_stage and not any(map(_may_be_parts, (*args, *(kwargs or {}).values()))):
            return func(*args, **(kwargs or {}))  # nearly all that hooks do
        try:
            return self._call(func, args, kwargs or {}, sys._getframe(1))
        except UnsupportedError as error:
            self.refused = error
            raise

    def _call(self, func: Any, args: Any, kwargs: Any, caller: FrameType) -> Any:
        for operands in _together(func, (*args, *kwargs.values())):
            if _of_two_stages(operands):
                raise UnsupportedError(
                    f"{self.name} computes with a tensor that this rank has and one that another stage of the pipeline"
                    " holds, such as a target network's weight and the weight that it follows. Use"
                    " pipeline_parallel_size=1; tensor parallelism and ZeRO can do this."
                )
        if assigns_data(func) and isinstance(args[0], DTensor):
            with torch.no_grad():  # the attribute of a DTensor is not where its values are
                return self._run(Tensor.copy_, args, {})
        if getattr(func, "__name__", "") in _READS and isinstance(args[0], Tensor):
            args = (self._read(args[0], caller), *args[1:])
        if func == _IS_META and caller.f_code.co_filename == nn.init.__file__ and args[0].is_meta:
            raise UnsupportedError(
                f"{self.name} initialises a tensor that another stage of the pipeline holds by"
                f" {caller.f_code.co_name.removeprefix('_no_grad_')}, which draws nothing here: all later"
                " random numbers would differ. Do so in setup, or use pipeline_parallel_size=1."
            )
        return self._run(func, args, kwargs)

    def _read(self, tensor: Tensor, frame: FrameType) -> Tensor:
        """What numbers are read from: those of this rank's part would be others.

        All ranks that hold a part must read. A rank that is alone in it (`if trainer.is_global_zero:`) shows the first
        time at each place in the code, before messages meet others that are not meant for them.
        """
        if tensor.is_meta:
            raise _absent(self.name, "a number is read from it")
        if not isinstance(tensor, DTensor):
            return tensor
        if not all(placement.is_replicate() for placement in tensor.placements):
            while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
                frame = frame.f_back
            place = f"reading a weight in {self.name} (line {frame.f_lineno})"
            if place not in self.read:
                self.read.add(place)
                peers.meet(place, tensor.device_mesh.mesh.flatten().tolist())
        if self.shards is None:
            return tensor.full_tensor()
        owner = self.shards.owner(tensor, "reads numbers from")
        return tensor.full_tensor() if owner is None else self.shards.composed.whole(owner, tensor)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            with self.shards or nullcontext():
                return func(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            if is_absent(error):
                raise _absent(self.name, error) from error
            if not any(text in str(error) for text in ("DTensor", "sharding strategy", "sharded dimension")):
                raise
            raise UnsupportedError(
                f"{self.name} computes something with parameters that cannot be done with the part that a rank holds"
                f" ({type(error).__name__}: {error}). Element by element it can, with other parameters; whole tensors"
                " are put in by load_state_dict. Or do it in setup, or use data parallelism with zero_stage=0."
            ) from error


def _may_be_parts(value: Any) -> bool:
    return isinstance(value, DTensor | list | tuple | dict)


def _together(func: Any, values: Sequence[Any]) -> Iterator[list[Tensor]]:
    """Tensors that are computed with each other."""
    name = getattr(func, "__name__", "")
    if name == "__deepcopy__":  # comes with a memo of everything that was copied before
        return
    if not name.startswith("_foreach"):
        yield [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        return
    lists = [value for value in values if isinstance(value, list | tuple)]
    for row in zip(*lists, strict=False):
        yield [item for item in row if isinstance(item, Tensor)]


def _of_two_stages(tensors: list[Tensor]) -> bool:
    """Whether some are on meta and others not. A single number may come from anywhere."""
    large = [tensor for tensor in tensors if tensor.dim()] or tensors
    return len({tensor.is_meta for tensor in large}) > 1
