"""The table of parameters: where each one is, and the way from this rank's shard to the full tensor and back.

`parallelize` makes it. Clip norm, checkpoints, averages, hooks and optimizers read it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_3d.module.anatomy import parameter_names
from lightning_3d.module.torch_private import memory_key, version_of
from lightning_3d.module.undo import replaced_attributes
from lightning_3d.ranks.shards import local


@dataclass(eq=False)
class Held:
    """One parameter on this rank, and what the axes did to it."""

    names: tuple[str, ...]
    """The first one is that of checkpoints; tied weights have several."""
    before: nn.Parameter
    """The user's object. An optimizer that was built earlier has it."""
    now: nn.Parameter
    """The object that is registered now: a shard, the user's object, or one on meta that another stage owns."""
    split: Any = None
    """The division among tensor ranks, or of experts among their owners (`TensorSplit`)."""
    rows: Any = None
    """The division among data ranks (`zero.sharded.Rows`)."""
    counted: bool = True
    """True where this rank's stage counts it in norms and provides it to the others."""
    source: int | None = None
    """The first pipeline rank that has it, where others have not."""
    disk: Any = None
    """This rank's shard where it is on a disk (`DiskTensor`)."""


Given = tuple[nn.Parameter, Tensor, int, int]
"""A parameter, the shard of it or of a state of its optimizer, and versions of a full copy of it and its own."""


class Axis(Protocol):
    """A parallelism that divides parameters."""

    def full(self, held: Held, shard: Tensor) -> Tensor:
        """The tensor that the ranks of this axis have together. Collective over them."""

    def shard(self, held: Held, full: Tensor) -> Tensor:
        """The shard of `full` that this rank of the axis has."""


Exchange = Callable[[Mapping[Any, Mapping[str, Any]]], dict[Any, dict[str, Any]]]
"""Returns the entries of all ranks of a pipeline. Collective."""


class Parameters:
    """The parameters of `module`. `axes` are those that divide them, in the order in which they were applied."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.axes: list[Axis] = []
        self.exchange: Exchange | None = None
        """Of the stages of a pipeline."""
        self.given: dict[Tensor, Given] | None = None
        """Full tensors that states give to a hook or a step, and those that code has kept from earlier ones."""
        self._kept = WeakTensorKeyDictionary()
        self._of = {each: Held(names, each, each) for each, names in parameter_names(module).items()}
        self._rows = list(self._of.values())

    def __iter__(self) -> Iterator[Held]:
        return iter(self._rows)

    def find_registered(self) -> None:
        """Note the objects that an axis has registered in the place of others."""
        now = dict(self.module.named_parameters(remove_duplicate=False))
        for held in self._rows:
            held.now = now[held.names[0]]
        self._of = {held.now: held for held in self._rows}

    def add_copies(self, copies: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Let each key, which is sharded like the parameter that it maps to, be looked up too."""
        self._of |= {copy: self._of[parameter] for copy, parameter in copies.items()}

    def of(self, parameter: Tensor) -> Held | None:
        """The row of `parameter`; None for a tensor that is no parameter of the module."""
        return self._of.get(parameter)  # type: ignore[call-overload]

    def full(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """The full tensor of `shard`, which is sharded like `parameter`. Collective over the axes that divide it."""
        if (held := self.of(parameter)) is not None:
            for axis in reversed(self.axes):
                shard = axis.full(held, shard)
        return shard

    def shard(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """This rank's shard of `full`, sharded like `parameter`."""
        if parameter.is_meta:
            return torch.empty_like(full, device="meta")
        if (held := self.of(parameter)) is not None:
            for axis in self.axes:
                full = axis.shard(held, full)
        return full

    def give(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """The full tensor for a state, of a parameter or what an optimizer has of it. It is no copy on one device."""
        full = self.full(parameter, shard)
        if self.given is not None and memory_key(full) != memory_key(local(shard)):
            self.given[full] = (parameter, shard, version_of(full), version_of(shard))
        return full

    @contextmanager
    def giving(
        self, state: Mapping[str, Any] | None = None
    ) -> Iterator[Callable[[], Iterator[tuple[nn.Parameter, Tensor, Tensor, bool]]]]:
        """Note what is given to the code inside, beside a `state`. Yields a function that finds what it has changed.

        That is each parameter, the shard that was given, that of the change, and True where nothing else changed it.
        Something may have, since an earlier hook or step kept what it was given.
        """
        kept = dict[Tensor, Given](self._kept)
        given = kept | {
            full: (held.now, held.now, version_of(full), version_of(held.now))
            for held in (self._rows if state else ())  # a step gives none
            for full in ((state or {}).get(name) for name in held.names)
            if type(full) is Tensor and isinstance(held.now, DTensor)
        }

        def changed() -> Iterator[tuple[nn.Parameter, Tensor, Tensor, bool]]:
            written = {full: each for full, each in given.items() if version_of(full) != each[2]}
            times = Counter(memory_key(local(shard)) for _, shard, *_ in written.values())
            for full, (parameter, shard, _, then) in written.items():
                stayed = full not in kept and version_of(shard) == then and times[memory_key(local(shard))] == 1
                yield parameter, shard, self.shard(parameter, full), stayed
                given[full] = (parameter, shard, version_of(full), then)

        with replaced_attributes(self, given=given):
            yield changed
        self._kept.update(given)

    def counts(self, parameter: nn.Parameter) -> bool:
        """True where this rank's stage is the one that counts a parameter which several stages have."""
        held = self.of(parameter)
        return held is None or held.counted

    def split(self, parameter: Tensor) -> Any:
        """The division of `parameter` among tensor ranks or owners of experts; None without one."""
        held = self.of(parameter)
        return None if held is None else held.split

    def disk(self, parameter: Tensor) -> Any:
        """The shard of `parameter` where it is on a disk."""
        held = self.of(parameter)
        return None if held is None else held.disk

    def swaps(self) -> dict[nn.Parameter, nn.Parameter]:
        """The user's object -> the one that is registered now, for those that were replaced."""
        return {held.before: held.now for held in self._rows if held.now is not held.before}
