"""Modules that stay in shards between runs, since a rank has no room for all of them."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.keeper import state_bytes
from lightning_3d.errors import ConfigurationError, UnsupportedError
from lightning_3d.layout import Layout
from lightning_3d.module.amounts import show_bytes
from lightning_3d.module.host_memory import machine_memory
from lightning_3d.module.materialize import ABSENT
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.parallel.parallel_plan import ParallelPlan
from lightning_3d.ranks import talk
from lightning_3d.usercode.averages_private import AVERAGES
from lightning_3d.usercode.between_runs import BetweenRuns
from lightning_3d.zero.data_axis import DataAxis

Teardown = Literal["whole", "sharded", "auto"]
IN_SHARDS = "lightning_3d_in_shards"
"""Attribute of a module that is in shards after a run."""
AGAIN = "Build the module again and load a checkpoint of it with ckpt_path=."
SHARE = 0.5
"""Share of the memory of a host, and of a device, that whole modules may take after a run."""


Division = Mapping[str, Any]
"""Settings that a module is divided by."""


@dataclass(frozen=True, eq=False)
class InShards:
    """A divided module between two runs, with the groups through which its ranks exchange shards."""

    parallel: ParallelModule
    plan: ParallelPlan
    layout: Layout
    division: Division
    data_axis: DataAxis
    world: weakref.ref[dist.ProcessGroup]
    parameters: Mapping[str, nn.Parameter]
    rest: BetweenRuns

    @classmethod
    def of(
        cls, parallel: ParallelModule, plan: ParallelPlan, layout: Layout, division: Division, data_axis: DataAxis
    ) -> "InShards":
        world = dist.group.WORLD
        assert world is not None
        parameters = dict(parallel.module.named_parameters())
        return cls(parallel, plan, layout, division, data_axis, weakref.ref(world), parameters, BetweenRuns(parallel))

    def check(self, module: nn.Module, division: Division) -> None:
        """Raise if a run that divides `module` by `division` cannot use these shards."""
        name = type(module).__name__
        if module is not self.parallel.module:
            raise ConfigurationError(
                f"This {name} is a copy of a module that an earlier run has left in shards. Use the module itself."
            )
        if self.world() is not dist.group.WORLD:
            raise ConfigurationError(
                f"An earlier run has left {name} in shards, and the process group of that run has ended. Without it no"
                f" rank can use the shards of others. {AGAIN}"
            )
        was = self.division
        names = [name for name in division if division[name] != was[name]]
        if names:
            differences = ", ".join(f"{name}={division[name]!r} (was {was[name]!r})" for name in names)
            raise ConfigurationError(
                f"An earlier run has left {name} in shards, which this run would divide otherwise: {differences}. Use"
                " the same settings. For others, save it with trainer.save_checkpoint, build the module again, and"
                ' pass the checkpoint as ckpt_path=. A run with the same settings and teardown="whole" makes it whole.'
            )

    def check_parameters(self) -> None:
        """Raise if user code has put other parameters into the module since the last run."""
        module = self.parallel.module
        now = dict(module.named_parameters())
        other = [name for name in {**self.parameters, **now} if now.get(name) is not self.parameters.get(name)]
        if other:
            raise ConfigurationError(
                f"An earlier run has left {type(module).__name__} in shards. Since then {other[0]!r} is another"
                f" parameter ({len(other)} in all), which is not in shards. Does configure_model() build the module"
                " again? Lightning calls it in each run: return at once where the layers are there."
            )


def check_goes_on(module: nn.Module, callbacks: Sequence[Callback], verify: str | None) -> None:
    """Raise for a callback or setting that needs the whole module where it is in shards."""
    needs = [type(callback).__name__ for callback in callbacks if isinstance(callback, AVERAGES)]
    needs += ['verify="first_step"'] * (verify == "first_step")
    if needs:
        raise UnsupportedError(
            f"An earlier run has left {type(module).__name__} in shards, and {needs[0]} copies the whole module. Leave"
            ' it out, or use teardown="whole" in the earlier run.'
        )


def first_shard(module: nn.Module) -> str | None:
    """The first parameter of which this rank has a shard or nothing."""
    parameters = module.named_parameters()
    return next((name for name, each in parameters if isinstance(each, DTensor) or hasattr(each, ABSENT)), None)


def check_whole(module: nn.Module) -> None:
    """Raise if a module that no earlier run has left in shards has shards."""
    name = first_shard(module)
    if name is not None:
        raise ConfigurationError(
            f"This rank has only a shard of {type(module).__name__}.{name}, or nothing of it. The module is a copy of"
            f" one in shards, or an earlier run with it has failed. {AGAIN}"
        )


def shards_of(module: nn.Module) -> InShards | None:
    """The shards that an earlier run has left of `module`, None where it is whole."""
    return vars(module).get(IN_SHARDS)


def put_shards(module: nn.Module, in_shards: InShards | None) -> None:
    vars(module).pop(IN_SHARDS, None)
    if in_shards is not None:
        vars(module)[IN_SHARDS] = in_shards


def stays_in_shards(
    teardown: Teardown,
    module: LightningModule,
    layout: Layout,
    callbacks: Sequence[Callback],
    *,
    ends: bool,
    ranks_of_host: int,
    device: torch.device,
) -> bool:
    """Return True if the module is to stay in shards after this run. Equal on every rank. Collective. With
    `teardown="auto"` the memory of whole modules is compared with that of the host and device.
    """
    if teardown == "whole" or not layout.holds_parts:
        return False
    averages = [type(callback).__name__ for callback in callbacks if isinstance(callback, AVERAGES)]
    reason = ""
    if ends:
        reason = "the processes of this run end with it, and their shards too. Start the script with torchrun, or"
    elif averages:
        reason = f"{averages[0]} copies the whole module at the start of each run. Leave it out, or"
    if teardown == "sharded" and reason:
        raise UnsupportedError(f'teardown="sharded": {reason} use teardown="whole".')
    if teardown == "sharded" or reason:
        return not reason
    if shards_of(module) is not None:
        return True
    size = state_bytes(module)
    room = [SHARE * machine_memory() / ranks_of_host]
    if device.type == "cuda":
        room.append(SHARE * torch.cuda.get_device_properties(device).total_memory)
    return talk.any_rank(size > min(room))


def why_shards(module: nn.Module) -> str:
    """One line for the user of teardown="auto"."""
    return (
        f"{type(module).__name__} stays in shards: with optimizer states each rank would need"
        f" {show_bytes(state_bytes(module))} for the whole. fit, validate, test, predict and"
        " trainer.save_checkpoint go on with the shards. For one file, save a checkpoint and run `lightning-3d"
        ' consolidate` or `lightning-3d export`; for the whole in memory, use teardown="whole".'
    )
