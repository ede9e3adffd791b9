"""The user's hooks between steps that compute with parameters: a target network that follows, clamped weights.

What they do with each element works on shards too. What torch would get wrong in silence there is done as it is meant,
or refused: parameters of other pipeline stages are on meta, and adding such a one to a real one changes nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_3d.errors import UnsupportedError
from lightning_3d.writes import assigns_data

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
_READS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__format__")


def watch_hooks(module: LightningModule, callbacks: Sequence[Callback], rest: Callable[[], None]) -> Callable[[], None]:
    """Run these hooks of the module and of the user's callbacks in `Between`; returns what undoes it.

    Args:
        rest: lets go of weights that an evaluation or a window of accumulation keeps gathered: a hook would see those
            in place of what it saw before, and what it writes to them is lost.
    """
    watched = []
    for owner in (module, *callbacks):
        for name in HOOKS:
            hook = getattr(owner, name, None)  # those of the sanity check are of callbacks only
            if hook is None:
                continue
            if name not in owner.__dict__ and not hook.__module__.startswith(("lightning.", "lightning_3d.")):
                owner.__dict__[name] = _watched(
                    hook, f"{type(owner).__name__}.{name}", _nothing if name in _WITHIN else rest
                )
                watched.append((owner, name))

    def undo() -> None:
        for owner, name in watched:
            owner.__dict__.pop(name, None)

    return undo


def _nothing() -> None: ...


def _watched(hook: Callable[..., Any], name: str, rest: Callable[[], None]) -> Callable[..., Any]:
    @wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        rest()
        with Between(name):
            return hook(*args, **kwargs)

    return run


class Between(TorchFunctionMode):
    """Entered around a hook called `name`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
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
        if getattr(func, "__name__", "") in _READS and isinstance(args[0], DTensor):
            args = (args[0].full_tensor(), *args[1:])  # a number would be that of this rank's part
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not any(text in str(error) for text in ("DTensor", "sharding strategy", "sharded dimension")):
                raise
            raise UnsupportedError(
                f"{self.name} computes something with parameters that cannot be done with the part that a rank holds"
                f" ({type(error).__name__}: {error}). Element by element it can, with other parameters; whole tensors"
                " are put in by load_state_dict. Or do it in setup, or use data parallelism with zero_stage=0."
            ) from error


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
