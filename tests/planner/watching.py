"""What a rank holds, sends and takes in a step of real training."""

import time
import warnings
import weakref
from functools import cache
from itertools import combinations
from typing import Any

from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_3d import Strategy3D
from lightning_3d.dryrun.forecast import Forecast, forecast
from lightning_3d.planner.catalogue import cluster_here
from tests.parity import QUIET
from tests.planner.sized import LAYOUTS, SIZED, STEPS

Measured = list[dict[str, Any]]
"""What `watch` found on each rank."""


class TensorPeak(TorchDispatchMode):
    """The most bytes of tensors alive at once, looked at after every operation of this thread.

    A storage counts from the first operation that makes or reads it until it is freed, whoever frees it.
    """

    def __init__(self, ignored: Any = ()) -> None:
        super().__init__()
        self.live: dict[int, Any] = {}
        self.ignored = {id(storage): storage for tensor in tree_leaves(ignored) for storage in _storages(tensor)}
        self.peak = 0

    def see(self, value: Any) -> None:
        for leaf in tree_leaves(value):
            for storage in _storages(leaf):
                key = id(storage)
                if key not in self.live and key not in self.ignored:
                    self.live[key] = weakref.ref(storage, lambda _, key=key: self.live.pop(key, None))

    def held(self) -> int:
        return sum(storage.nbytes() for ref in list(self.live.values()) if (storage := ref()) is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see((args, result))
        self.peak = max(self.peak, self.held())
        return result


def _storages(tensor: Any) -> list[Any]:
    if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
        return []
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return [local.untyped_storage()]


class Watch(Callback):
    """Times every step; counts what is sent in all of them, and what is held in the last."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.sent: list[dict[str, int]] = []
        self.rest: dict[str, int] = {}
        self.peak: TensorPeak | None = None

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.strategy.data_axis.ledger.reset()
        trainer.strategy.barrier()
        if batch_idx == STEPS - 1:
            self.peak = TensorPeak(batch)
            self.peak.see([*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())])
            self.peak.see([list(state.values()) for state in trainer.optimizers[0].state.values()])
            self.peak.__enter__()
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter() - self.began)
        if self.peak is not None:
            self.peak.__exit__(None, None, None)
        rows = trainer.strategy.data_axis.ledger.rows()
        self.sent.append({f"{row.axis} {row.collective}": row.bytes for row in rows})
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        self.rest = {
            "weights": sum(map(local_bytes, module.parameters())),
            "optimizer": sum(local_bytes(value) for value in states if value.ndim),
        }


def by_axis(sent: dict[str, int]) -> dict[str, int]:
    """The bytes of each axis, whatever they were sent for."""
    axes: dict[str, int] = {}
    for row, amount in sent.items():
        axis = row.split()[0]
        axes[axis] = axes.get(axis, 0) + amount
    return axes


def local_bytes(tensor: Tensor) -> int:
    if tensor.device.type == "meta":
        return 0
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def watch(name: str, layout: str, sizes: dict[str, int] | None = None) -> dict[str, Any]:
    """Train the module of `SIZED` under the layout of `LAYOUTS` on this rank."""
    warnings.simplefilter("ignore")
    seed_everything(7, verbose=False)
    watched, module = Watch(), SIZED[name](**(sizes or {}))
    strategy = Strategy3D(quiet=True, **LAYOUTS[layout])
    flags = {**QUIET, "devices": int(layout.split()[0]), "strategy": strategy, "max_epochs": 1}
    Trainer(**flags, limit_val_batches=0, callbacks=[watched]).fit(module)
    assert watched.peak is not None
    return {
        **watched.rest,
        "sent": watched.sent[2:],
        "peak": watched.peak.peak,
        "times": watched.times,
    }


@cache
def predicted(name: str, layout: str, **sizes: int) -> Forecast:
    """What the planner says of the module of `SIZED` under the layout of `LAYOUTS` on this machine."""
    world = int(layout.split()[0])
    module, wanted = SIZED[name](**sizes), Strategy3D(**LAYOUTS[layout])._wanted
    return forecast(module, module.batch(), wanted.fit(world), cluster_here("cpu", devices_per_node=world))


def seconds(seen: Measured) -> float:
    """Of the quickest step: a step ends when the last rank does."""
    return min(map(max, zip(*(one["times"][2:-1] for one in seen), strict=True)))


def in_order(pairs: list[tuple[float, float]]) -> float:
    """The share of pairs of layouts of which the quicker one is the one that was said to be."""
    compared = [(a[0] < b[0]) == (a[1] < b[1]) for a, b in combinations(pairs, 2)]
    return sum(compared) / len(compared)
