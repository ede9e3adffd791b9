"""ZeRO stages 1, 2 and 3 and hybrid shard: FSDP2 with the knobs of the table in docs/zero.md."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_3d.axes.parameters import Held
from lightning_3d.layout import EXPERT_AXIS, Layout
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.module.forward import Layer, ranks_of
from lightning_3d.module.graph_private import graph_leaves
from lightning_3d.module.host_memory import return_freed_memory
from lightning_3d.module.packed_weights import is_packed
from lightning_3d.module.torch_private import is_compiled, uncompiled
from lightning_3d.module.undo import UndoStack
from lightning_3d.ranks.mesh import copies_mesh, shard_mesh
from lightning_3d.ranks.shards import local, on_mesh, sharded_axes
from lightning_3d.sandbox.deferred import empty, realize
from lightning_3d.sandbox.writes import RefuseWrites, gradient_set, replaced
from lightning_3d.zero import fsdp_private, fsdp_unit_private
from lightning_3d.zero.changed_weights import WHY, RefuseOfShards, follow_toggles, unwritten
from lightning_3d.zero.data_axis import DataAxis
from lightning_3d.zero.data_parallel import DataParallel, OwnExperts, ReplicatedData
from lightning_3d.zero.half_weights import HalfWeights
from lightning_3d.zero.missing_gradients import MissingGradients
from lightning_3d.zero.outside_units import OutsideUnit
from lightning_3d.zero.rows import make_contiguous, my_interval
from lightning_3d.zero.shard_units import looks_up, outside_units, shard_units, unshardable
from lightning_3d.zero.shards_on_disk import ShardsOnDisk

_CLOSELY = 3
"""Steps in which each call is checked for changes of weights."""


class ShardedData(DataParallel):
    """Shard `module` over the data axis, in place: weights are equal on every rank before.

    In a pipeline parameters stay gathered for a step of many microbatches, and gradients are reduced once, after it.
    Weights that autocast casts are gathered in `half`. `experts` are sharded over the ranks that own the same.
    """

    def __init__(
        self,
        module: nn.Module,
        anatomy: Anatomy,
        layout: Layout,
        mesh: DeviceMesh,
        data_axis: DataAxis,
        *,
        half: torch.dtype | None,
        disk: ShardsOnDisk | None,
        experts: OwnExperts,
        undo: UndoStack,
    ) -> None:
        self.module, self.stage, self.pipelined = module, layout.zero_stage, layout.pipelined
        axes = copies_mesh(mesh) if data_axis.native_copies else shard_mesh(mesh)
        mesh = shard_mesh(mesh)
        blocks = shard_units(module, anatomy, freed=self._frees, warns=self._frees)
        apart = outside_units(module, [*blocks, *experts.modules]) if self._frees else {}
        replicas = data_axis.expert_mesh
        shared = experts.modules if replicas is not None else []
        self.blocks = [*shared, *blocks]
        units = [*self.blocks, *apart.values()]  # experts first: FSDP2 leaves what is sharded already to its unit
        refused = unshardable([*units, module], set(experts.parameters if replicas is None else experts.alone))
        self.rows: dict[nn.Parameter, Rows] = {}
        """Those of each parameter that is registered in the place of another. The table of parameters has them too."""
        pin = mesh.device_type != "cpu" and disk is None
        host = CPUOffloadPolicy(pin_memory=pin) if layout.offload == "all" else OffloadPolicy()
        self.disk = disk

        def my_part(parameter: Tensor) -> tuple[int, int] | None:
            """The rows of it, or of this tensor rank's shard, that FSDP2 keeps."""
            if parameter in refused:
                return None
            over = replicas if replicas is not None and EXPERT_AXIS in sharded_axes(parameter) else mesh
            return my_interval(len(local(parameter)), over.get_local_rank(), over.size())

        with fsdp_private.same_classes([*units, module]):
            for unit in [*units, module]:
                full = dict(unit.named_parameters())
                realize(full.values(), my_part)
                strides = {name: make_contiguous(parameter) for name, parameter in full.items()}
                fully_shard(
                    unit,
                    mesh=replicas if unit in shared else axes,
                    reshard_after_forward=self._frees and (unit in self.blocks or looks_up(unit)),
                    offload_policy=host,
                    ignored_params=set(refused),
                )
                groups = fsdp_private.groups_at(unit)
                if disk is not None:
                    for group in groups:
                        disk.add(group)
                # emptied unit by unit: full weights and shards of all units together would be the peak of set-up
                params = {param.sharded_param: param for group in groups for param in group.fsdp_params}
                placed = [(name, now) for name, now in unit.named_parameters() if now is not full[name]]
                for name, now in placed:
                    vars(now).update({} if is_packed(full[name]) else vars(full[name]))  # code chooses groups by them
                    self.rows[now] = Rows.of(params[now], full.pop(name), strides[name])
                return_freed_memory()
        fsdp_private.make_root(module)
        self.groups = fsdp_private.param_groups(module)
        self.names = dict(module.named_parameters(remove_duplicate=False))
        undo.collective(self._unshard)
        self.seam = data_axis.attach(module, shared)
        mine = dict.fromkeys(experts.parameters)
        here = [parameter for parameter in refused if not parameter.is_meta and parameter not in mine]
        copied = data_axis.expert_replicas([each for each in mine if each in refused and not each.is_meta])
        self.replicated = ReplicatedData(data_axis.replicas(here) if here else None, undo, copied)
        self.half = None if half is None else HalfWeights(self.groups, half, mesh.device_type)
        self.missing = MissingGradients(self.groups, self.seam, data_axis.axes.hosts)
        ranks, end = mesh.get_group(), self._end_with_reduction
        self.apart = {unit: OutsideUnit(unit, name, ranks, end, undo) for name, unit in apart.items()}
        """Large modules outside of the blocks. A step may read their parameters, as it may the root's."""
        # in compiled code a guard would end the graph; with autocast it decides about the precision of weights
        compiled = [inner for inner in module.modules() if self.half is None and is_compiled(inner)]
        unguarded = {inner for each in compiled for inner in each.modules()}
        for group in self.groups:
            for owner in fsdp_private.owners(group) - unguarded:
                guard = _guard(group, self.half, end if owner in self.apart else None)
                undo.callback(owner.register_forward_pre_hook(guard, prepend=True).remove)
            fsdp_unit_private.watch_places(group, self._check_places)
            fsdp_unit_private.keep_in_transforms(group)
        if self.half is not None:
            for block in module.modules():
                if Layer.SPLIT in ranks_of(block):
                    undo.callback(block.register_forward_pre_hook(self.half.before_block, prepend=True).remove)
        for unit in units:
            for group in fsdp_private.groups_at(unit):
                fsdp_unit_private.note_second_order(group, self._keep_gathered)
                if not is_compiled(unit):  # in compiled code a hook would end the graph
                    fsdp_unit_private.return_arguments(unit, group, undo)
                    if self._frees:
                        fsdp_unit_private.keep_returned(unit, group, undo)
            if self._frees and not is_compiled(unit) and unit not in self.apart:
                fsdp_unit_private.hook_outputs(fsdp_private.state_of(unit))
        follow_toggles(module, self._follow_shards, undo)
        self.accumulates = self.in_window = self.second_order = self.stepping = False
        """`second_order`: True from a derivative in the step that has a graph of its own, to the end of backward.
        `in_window`: True where parameters that are not gathered may have gradients that are not reduced."""
        self.of_shards = RefuseOfShards(self.groups, self.names)
        self.rules = self.of_shards, RefuseWrites(self._late, WHY)
        self.trained = 0
        """Number of training steps so far."""
        self.ended: dict[Tensor, RemovableHandle] = {}
        self.stand_ins: dict[Any, Tensor] = {}
        self.streams = not self.seam.engine.threaded
        undo.callback(self._remove_ends)
        undo.collective(self.seam.detach)
        undo.collective(self.missing.read_last)
        undo.collective(self.reshard)

    @property
    def _frees(self) -> bool:
        """True where a block's parameters are freed after its forward and gathered again for its backward."""
        return self.stage == 3 and not self.pipelined

    def grad_holder(self, name: str) -> Tensor:
        """Return the tensor that has the gradient of the full parameter until it is reduced.

        Under mixed precision FSDP2 keeps an accumulated gradient in another dtype than the parameter. The tensor is
        then a stand-in, whose gradient `reduce` gives back.
        """
        parameter = self.names[name]
        if parameter not in self.rows:
            return parameter
        param = self.rows[parameter].param
        if not fsdp_private.accumulates_separately(param):
            return fsdp_private.full_parameter(param)
        if param not in self.stand_ins:
            self.stand_ins[param] = fsdp_private.stand_in(param)
        return self.stand_ins[param]

    def gather(self) -> None:
        fsdp_private.open_step(self.module)
        if self.half is not None:
            self.half.begin()
        if not self.streams and not self._frees:
            # Without streams nothing is prefetched by itself: start all gathers now, each block waits for its own.
            for group in self.groups:
                fsdp_private.gather(group, wait=False)
        for group in fsdp_private.groups_at(self.module):
            fsdp_private.gather(group)
            self._end_with_reduction(group)
        for unit in self.apart.values():
            unit.begin()

    @contextmanager
    def forbid_writes(self) -> Iterator[None]:
        self.trained, self.stepping = self.trained + 1, True
        closely = self.trained <= _CLOSELY or fsdp_unit_private.is_freed_kept(self.groups)
        try:
            with uncompiled(self.module) if closely else nullcontext():
                with unwritten(self.groups, self.names, closely=closely):
                    yield
            self.meet()
            for group in self.groups:
                self._check_places(group)
        finally:
            self.stepping = False

    def _late(self) -> Iterator[tuple[str, Tensor]]:
        """Shards that a step must not change: it has begun to gather them. Optimizers may step inside of one."""
        optimizers_inside = self.stepping and not getattr(self.module, "automatic_optimization", True)
        if self.stage < 3 and not optimizers_inside:
            yield from ((name, shard) for name, shard in self.names.items() if shard in self.rows)

    def meet(self) -> None:
        if self.stepping and self._frees:
            self.seam.meet("a message or the end of the step")

    def _check_places(self, group: Any) -> None:
        refused = self.stepping or self.pipelined or torch.is_grad_enabled()  # an evaluation may have other values
        for param in fsdp_unit_private.out_of_place(group) if refused else ():
            raise replaced(next(name for name, shard in self.names.items() if shard is param.sharded_param))

    def _end_with_reduction(self, group: Any) -> None:
        """Have every backward that reaches the group's parameters end with the reduction, whoever calls it."""
        # a hook is kept where the collector does not look: it would keep a module in shards alive
        weak_group, weak_module = weakref.ref(group), weakref.ref(self.module)

        def end(_: Tensor) -> None:
            group, module = weak_group(), weak_module()
            assert module is not None
            fsdp_unit_private.reduce_late(group)
            fsdp_private.queue_end_of_backward(module)

        for param in group.fsdp_params:
            full = fsdp_private.full_parameter(param)
            if full.requires_grad and full not in self.ended:
                self.ended[full] = full.register_post_accumulate_grad_hook(end)

    def _follow_shards(self) -> None:
        """Have the gathered parameters get gradients where their shards do."""
        fsdp_private.follow_shards(self.groups)
        for group in (*fsdp_private.groups_at(self.module), *(unit.group for unit in self.apart.values())):
            if group.is_unsharded:
                self._end_with_reduction(group)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Leave gathered what no forward frees: a rank that has more batches than another would gather it alone."""
        with nullcontext() if self._frees else fsdp_unit_private.stay_gathered(self.groups):
            closely = fsdp_unit_private.is_freed_kept(self.groups)
            with unwritten(self.groups, self.names, closely=closely, step="An evaluation"):
                yield

    def finish_forward(self) -> None:
        if self.second_order:  # of an evaluation, which has no backward
            self.second_order = False
            fsdp_private.accumulate_only(self.module, self.groups, self.accumulates)
            if self._frees:
                fsdp_private.reshard(self.groups)
        fsdp_private.close_step(self.module, self.groups)
        self._end_reads()

    def _keep_gathered(self) -> None:
        """Keep all parameters for the graph of a derivative, and reduce once, after the backward of the loss."""
        self.second_order = True
        fsdp_private.accumulate_only(self.module, self.groups, True)
        for unit in self.apart.values():
            unit.hold()

    def check_backward(self, loss: Tensor, inputs: Iterable[Tensor]) -> None:
        if self.trained <= _CLOSELY:
            self.of_shards.check([*inputs, *graph_leaves(loss)], loss)

    def check_gradients(self) -> None:
        for shard in fsdp_unit_private.with_full_gradients(self.groups):
            raise gradient_set(next(name for name, known in self.names.items() if known is shard))

    def before_backward(self, loss: Tensor) -> None:
        self.replicated.before_backward(loss)
        self.missing.active = True
        for group in self.groups if self.second_order else ():
            fsdp_private.gather(group)
        if self.trained == 1 and self.streams and self._frees:
            fsdp_private.prefetch_in([module for module in self.seam.order if module is not self.module])
        fsdp_private.lead_shards(self.groups)  # at its end gathered parameters are freed
        if loss.requires_grad:
            loss.register_hook(lambda grad: fsdp_private.start_backward(self.module, grad))

    def after_backward(self) -> None:
        if self.second_order:
            self.second_order = False
            fsdp_private.accumulate_only(self.module, self.groups, self.accumulates)
            if not self.accumulates:
                fsdp_private.reduce_now(self.module, self.groups)
        self.seam.finish()
        self.missing.active = False
        if not self.accumulates:
            self.in_window = False
            self.missing.finish()
        self.replicated.after_backward()
        self._end_reads()

    def _end_reads(self) -> None:
        for unit in self.apart.values():
            unit.end()
        if self.disk is not None:
            self.disk.end()

    def reduce(self) -> None:
        for param, stand_in in self.stand_ins.items():
            param.unsharded_accumulated_grad = stand_in.grad
        self.stand_ins = {}
        self.accumulate_only(False)
        self.in_window, self.missing.active = False, True
        fsdp_private.reduce_now(self.module, self.groups)
        self.seam.finish()
        self.missing.finish()
        self.replicated.reduce()

    def accumulate_only(self, on: bool) -> None:
        self.replicated.accumulate_only(on)
        if self.stage == 1 or self.pipelined:
            self.accumulates, self.in_window = on, on or self.in_window
            fsdp_private.accumulate_only(self.module, self.groups, on)

    def discard_pending(self) -> None:
        fsdp_private.discard_pending(self.groups)

    def gradients_stay(self) -> AbstractContextManager[Any]:
        return fsdp_unit_private.gradients_stay(self.groups)

    def reshard(self) -> None:
        fsdp_private.reshard(self.groups)
        self._end_reads()
        if self.half is not None:
            self.half.end()

    def gathered(self, *, before: bool = False) -> Sequence[tuple[Tensor, nn.Parameter]]:
        return fsdp_private.gathered(self.groups, before)

    def shards_registered(self) -> AbstractContextManager[Any]:
        return fsdp_unit_private.shards_registered(self.groups, freed=self.in_window)

    def used_again(self) -> list[nn.Parameter]:
        """A backward gathers what was freed after its forward. A window of accumulation keeps what is gathered."""
        if self.accumulates:
            return [shard for _, shard in self.gathered()]
        freed = [group for group in self.groups if not group.is_unsharded] if self._frees else []
        return [shard for group in freed for shard in fsdp_private.sharded_parameters(group) if shard.requires_grad]

    def full(self, held: Held, shard: Tensor) -> Tensor:
        return shard if held.rows is None or not isinstance(shard, DTensor) else held.rows.full(shard)

    def shard(self, held: Held, full: Tensor) -> Tensor:
        return full if held.rows is None else fsdp_private.shard_rows(held.rows.param, local(full))

    def _unshard(self) -> None:
        """Register the full parameters again. Collective."""
        for now, rows in self.rows.items():
            original = rows.parameter(rows.full(now.detach()))
            original.requires_grad_(now.requires_grad)
            fsdp_private.replace(rows.param, original)
        fsdp_private.remove(self.module)

    def _remove_ends(self) -> None:
        for hook in self.ended.values():
            hook.remove()  # the collector cannot see references of autograd: one left would keep the module alive
        self.ended = {}


@dataclass(frozen=True)
class Rows:
    """A parameter of which each data rank has some rows, and the one that it was before, without its values."""

    param: Any
    """FSDP2's own, which has the shard."""
    plain: nn.Parameter | None
    """The user's own parameter object, emptied; None where tensor parallelism had replaced it."""
    mesh: DeviceMesh | None = None
    placements: tuple[Any, ...] = ()
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    """Of a plain parameter only where it was not contiguous (channels_last)."""

    @classmethod
    def of(cls, param: Any, parameter: nn.Parameter, stride: tuple[int, ...]) -> "Rows":
        if isinstance(parameter, DTensor):
            return cls(param, None, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
        empty(parameter)
        return cls(param, parameter, stride=stride)

    def full(self, shard: Any) -> Tensor:
        """All rows of `shard`, a tensor parallel DTensor where the parameter was one. Collective."""
        full = fsdp_private.full_rows(self.param, shard.to_local())
        if self.mesh is None:
            return full
        return on_mesh(full, self.mesh, self.placements, torch.Size(self.shape), self.stride)

    def parameter(self, full: Tensor) -> nn.Parameter:
        """Return the parameter that was there before, with these values."""
        if self.plain is None:
            return nn.Parameter(full)
        self.plain.data = full.new_empty_strided(full.shape, self.stride).copy_(full) if self.stride else full
        return self.plain


def _guard(group: Any, half: HalfWeights | None, gathered: Callable[[Any], None] | None) -> Callable[..., None]:
    """Gather a group when a module of it is not called through its block or step, and call `gathered`."""

    def gather(module: nn.Module, args: Any) -> None:
        fsdp_private.gather(group)
        if half is not None:
            half.before_forward(module, [group])
        if gathered is not None:
            gathered(group)

    return gather
