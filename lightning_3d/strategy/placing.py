"""The module and the axes of a run: first values, mesh and groups, and at the end a module whole or in shards."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_3d.axes.group import Group, broadcast_tensors
from lightning_3d.checkpoint.pretrained_private import read_on_use
from lightning_3d.errors import UnsupportedError
from lightning_3d.layout import Layout
from lightning_3d.module.packed_weights import plain_tensors, scales
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.ranks import talk
from lightning_3d.ranks.dtensor_private import deep_copy
from lightning_3d.ranks.groups import group_alone, groups_in_step, open_groups, return_groups
from lightning_3d.ranks.random_streams import drawn_like_first, share_random_state
from lightning_3d.ranks.users_group_private import UsersGroups, show_data_ranks
from lightning_3d.sandbox.deferred import SMALL, Built, Deferred, deferring, leave_on_host, move_later, realize
from lightning_3d.sandbox.fingerprint import is_absent
from lightning_3d.sandbox.first_batch import forget_reads
from lightning_3d.sandbox.recorded_value import reads
from lightning_3d.strategy.in_shards import AGAIN, Division, InShards, check_goes_on, put_shards, shards_of, why_shards
from lightning_3d.strategy.one_run import Run
from lightning_3d.strategy.weights_in_step import watch_weights
from lightning_3d.zero.data_axis import DataAxis
from lightning_3d.zero.data_batch_norm import DataBatchNorm


@contextmanager
def built_in_parts() -> Iterator[Built]:
    """Build modules inside without memory for large parameters, with the random numbers of rank 0."""
    with drawn_like_first(), deferring(read_on_use) as built:
        yield built


def warn_of_full(module: nn.Module, built: Sequence[Built]) -> None:
    """Warn once of the parameters that this rank builds in full, although they were built in parts."""
    reasons = {parameter: why for each in built for parameter, why in each.in_full}
    reasons |= {
        parameter: "its value was used before training"
        for each in built
        for parameter in each.deferred
        if not isinstance(parameter, Deferred)
    }
    full = {name: reasons[parameter] for name, parameter in module.named_parameters() if parameter in reasons}
    for why in dict.fromkeys(full.values()):
        names = [name for name, reason in full.items() if reason == why]
        rank_zero_warn(
            f"Each rank builds {', '.join(names[:5])}{', ...' if names[5:] else ''} in full before it keeps a shard"
            f" ({len(names)} parameters): {why}."
        )


@torch.no_grad()
def keep_on_host(module: nn.Module, device: torch.device) -> None:
    """Leave large parameters in host memory until their parts move to `device`. Collective over the world.

    Each one has the value of rank 0 afterwards.
    """
    for parameter in module.parameters():
        if parameter.device == device or (parameter.nbytes < SMALL and not isinstance(parameter, Deferred)):
            continue
        if isinstance(parameter, Deferred):
            move_later(parameter, device)
            continue
        here = parameter.detach().to(device)
        there = here.clone()
        broadcast_tensors([there], Group())
        if not torch.equal(there, here):
            parameter.data = there.to(parameter.device)
        leave_on_host(parameter, device)


def share_first_values(module: nn.Module) -> None:
    """Give parameters and buffers the values of rank 0, on every rank. Collective over the world.

    A deferred parameter is computed and sent only if some rank recorded other operations for it, or reads other bytes.
    """
    deferred = {name: item for name, item in module.named_parameters() if isinstance(item, Deferred)}
    mine = {name: item.lightning_3d_recorded.step.digest for name, item in deferred.items()}
    everywhere = [mine] if talk.all_equal(mine) else talk.gather(mine)
    equal = {name for name, digest in everywhere[0].items() if all(there.get(name) == digest for there in everywhere)}
    others = {name: item for name, item in deferred.items() if name not in equal}
    if any(reads(item.lightning_3d_recorded.step) for item in others.values()):
        rank_zero_warn(
            f"Ranks read other values of {', '.join([*others][:5])}{', ...' if len(others) > 5 else ''} from their"
            f" weights files ({len(others)} parameters), as from an older download on one node. All train with those of"
            " rank 0, and each builds these in full. Give each node the same files."
        )
    realize(others.values())
    here = [item for item in module.parameters() if not isinstance(item, Deferred)]
    given = [*scales(module), *(plain for item in (*here, *module.buffers()) for plain in plain_tensors(item))]
    broadcast_tensors(given, Group())


def open_axes(run: Run, layout: Layout, ranks_per_node: int) -> None:
    """Open the mesh and the groups of `layout`, or use those of a module in shards. Every rank must call it."""
    run.layout = layout
    if run.in_shards is not None:
        run.in_shards.check(run.module, division_of(run))
        check_goes_on(run.module, run.callbacks, run.settings.verify)
        run.parallel, run.opened = run.in_shards.parallel, run.in_shards.data_axis
    else:
        nearby = ranks_per_node // layout.tensor_parallel_size or 1
        config = run.settings.comm_config(streams=run.streams, ranks_per_node=nearby)
        talk.any_rank(False)  # a new group waits all its time for a rank that has failed, and this ends with that rank
        axes = open_groups(layout, run.rank, run.device.type, run.settings.timeout)
        run.opened = DataAxis(axes, config, streams=run.streams)
    run.module._device_mesh = run.mesh
    run.undo.set(DTensor, "__deepcopy__", deep_copy)
    watch_weights(run)
    if (users := run.data_axis.axes.users) is not None:
        run.undo.callback(show_data_ranks(users))
    choose_samplers(run)


@contextmanager
def users_alone(rank: int) -> Iterator[None]:
    """Let the user's code see this rank only, before there is a layout."""
    alone = group_alone(rank)
    with ExitStack() as undo:
        undo.callback(show_data_ranks(UsersGroups(alone, alone)))
        yield


def choose_samplers(run: Run) -> None:
    """Keep the dataloaders' own samplers with one data rank.

    Lightning's sampler shuffles every dataloader of `fit`, also one whose author did not ask for it, and draws from
    another seed than on one device.
    """
    several = run.chosen.data_parallel_size > 1 or run.shares_order
    run.trainer._accelerator_connector.use_distributed_sampler = run.wants_sampler and several


def close_axes(run: Run) -> None:
    """Close the axes at the end of `run`, unless a later run goes on with them. Collective."""
    forget_reads(run.trainer)
    in_shards, data_axis = shards_of(run.module), run.opened
    if data_axis is None or (in_shards is not None and in_shards.data_axis is data_axis):
        return
    data_axis.close()
    axes, position = data_axis.axes, _position(run) if data_axis.engine.idle else None
    # after an error, even one of all ranks, one rank may have sent more messages than another
    if not run.failure.judged or (not run.failure.alone and groups_in_step(axes, position)):
        return_groups(axes)


def _position(run: Run) -> tuple[int, int] | None:
    """The batch at which this rank is. None inside a step, whose messages may be under way."""
    if run.chosen.pipelined and (run.broke or not run.trainer.training):
        return None
    return run.trainer.global_step, run.trainer.fit_loop.batch_idx


def division_of(run: Run) -> Division:
    """All that the module of `run` is divided by."""
    precision = f"{type(run.plugin).__name__}({run.plugin.precision})"
    return {**vars(run.chosen), **vars(run.settings.choices), "precision": precision}


def reuse_shards(run: Run, in_shards: InShards) -> None:
    """Use the shards that an earlier run has left."""
    in_shards.check_parameters()
    in_shards.rest.end()
    run.plan = in_shards.plan
    put_shards(run.module, None)
    run.undo.callback(leave_module, run, in_shards.parallel)
    run.plugin.compute_on(run.device)
    share_random_state(run.peer_groups)


def convert_module(run: Run, parallel: ParallelModule, sync: Any) -> None:
    """Convert the module for `run`, before it is on its device; `sync` is Lightning's for `sync_batchnorm=True`."""
    if run.fitting and sync is not None:
        sync = DataBatchNorm(run.data_group) if isinstance(sync, TorchSyncBatchNorm) else sync
        sync.apply(run.module)
        parallel.changes.callback(sync.revert, run.module)
    run.plugin.compute_on(run.device)
    run.plugin.convert_module(run.module)


def share_values(run: Run, built: Sequence[Built]) -> None:
    """Give every rank equal weights and equal random streams."""
    share_first_values(run.module)
    warn_of_full(run.module, built)
    if run.verifies_first:
        realize(run.module.parameters())  # its copy needs all of them
    share_random_state(run.peer_groups)


def share_buffers(run: Run) -> None:
    """Evaluate with the buffers (batch-norm statistics, say) of the first data rank, as DDP does."""
    if run.chosen.data_parallel_size > 1:
        buffers = [buffer for buffer in run.module.buffers() if not is_absent(buffer)]
        broadcast_tensors(buffers, Group(run.data_group))


def check_batches(run: Run) -> None:
    """Raise where data ranks have unequally many batches to evaluate, and all gather weights for each. Collective."""
    gathers = run.chosen.zero_stage == 3 and not run.chosen.pipelined and run.chosen.data_parallel_size > 1
    kind = "test" if run.trainer.testing else "predict" if run.trainer.predicting else "val"
    mine = getattr(run.trainer, f"num_{kind}_batches")
    if gathers and not talk.all_equal(mine, run.data_group):
        raise UnsupportedError(
            f"Data ranks have {' | '.join(map(str, talk.gather(mine, run.data_group)))} batches to evaluate."
            " zero_stage=3 gathers weights from all of them for each batch, so those with more would wait for the"
            f" others. Give each as many, set limit_{kind}_batches to the least, or use zero_stage=2."
        )


def leave_module(run: Run, parallel: ParallelModule) -> None:
    """Make the module whole at the end of `run`, or leave it in shards."""
    if run.failure.alone:
        parallel.abandon()
    elif not run.stays_in_shards or run.plan is None:
        parallel.undo(run.trainer.optimizers)
        share_buffers(run)
    elif run.failure.judged:
        parallel.abandon()
        rank_zero_warn(f"{type(run.module).__name__} is in shards and cannot be used after the error. {AGAIN}")
    else:
        parallel.leave_in_shards()
        share_buffers(run)
        if run.settings.teardown == "auto" and run.in_shards is None:
            rank_zero_info(why_shards(run.module))
        put_shards(run.module, InShards.of(parallel, run.plan, run.chosen, division_of(run), run.data_axis))
