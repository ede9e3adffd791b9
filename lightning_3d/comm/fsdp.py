"""The seam into FSDP2: our collectives under `fully_shard`, in the background, without streams.

FSDP2 overlaps communication with compute by streams, and a CPU has none: its reduce-scatter blocks backward, its
all-gather blocks forward. Here both return at once and finish in the engine's thread.

[Note: deferred reduce-scatter] After a reduce-scatter `foreach_reduce` only makes views of the output and puts them
into `.grad`, as long as it has nothing more to compute from it. So the output may be filled later, at the latest by
the end of backward (`FullySharded.finish`, which queues itself there). It does compute from it when it divides
afterwards (fp16), casts to another dtype, reduces over a second mesh axis (HSDP), calls a user's hook, or adds to a
gradient that is there already. The last is turned around: the old gradient is put aside and added at the end. In the
other cases we wait on the spot.

[Note: promised buffers] FSDP2 copies gradients into one buffer before the reduce-scatter, and parameters into one
before the all-gather and out of one after it: on a CPU that costs as much as sending them. The buffers come from
`Comm.allocate`, which is ours, so for a ring (which can send several tensors as one collective) we return a `Promise`:
a tensor without memory that notes what FSDP2 copies into it. The ring then works on the gradients and parameters
themselves.

Everything of FSDP2 that is private is touched in this file only; read in torch 2.13, guarded for 2.11.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.tensor import DTensor

from lightning_3d.comm.collectives import Collectives, Native
from lightning_3d.comm.compression import Compression
from lightning_3d.comm.engine import Engine, Handle
from lightning_3d.comm.promise import Copies, Promise
from lightning_3d.comm.ring import Pieces
from lightning_3d.errors import UnsupportedError


class FullySharded:
    """Our collectives attached to every `fully_shard`-ed module under `root`.

    Args:
        root: holds the sharded modules (it may be one itself).
        collectives: over the ranks of the shard axis, on a group that nothing else uses.
        engine: runs them; the same one for everything on these ranks.
        replicate: over the ranks that hold the same shard (hybrid shard). Shard over a 1-D mesh then: with a 2-D
            mesh FSDP2 reduces over the second axis itself, with the library's all-reduce, and waits for it.
        compression: for the reduce-scatters, over the same ranks; its memory goes by module name and position.

    Backward ends with all gradients in place. Outside of a backward (`post_backward` called by a pipeline) each
    reduce-scatter is waited for, unless `deferred = True`: then call `finish()` before gradients are read.
    """

    def __init__(
        self,
        root: nn.Module,
        collectives: Collectives,
        engine: Engine,
        *,
        replicate: Collectives | None = None,
        compression: Compression | None = None,
    ) -> None:
        self.collectives, self.engine, self.replicate = collectives, engine, replicate
        self.compression = compression
        self.deferred = False
        self.direct = engine.threaded and collectives.takes_pieces and collectives.size > 1
        self.names = {module: name for name, module in root.named_modules()}
        self.modules = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self._order: list[nn.Module] = []
        self._pending: list[Handle] = []
        self._aside: dict[nn.Parameter, list[Tensor]] = {}
        self._queued = False
        self._later = False
        self._hooks = []
        for module in self.modules:
            module.set_custom_all_gather(_AllGather(self, module))
            module.set_custom_reduce_scatter(_ReduceScatter(self, module))
            module._set_unshard_async_op(engine.threaded)
            if replicate is not None:
                module.set_all_reduce_hook(self._all_reduce)
            if engine.threaded:
                self._hooks.append(module.register_forward_pre_hook(self._gather_ahead))

    def detach(self) -> None:
        """Give the modules FSDP2's own collectives back."""
        self.finish()
        for hook in self._hooks:
            hook.remove()
        for module in self.modules:
            module.set_custom_all_gather(DefaultAllGather())
            module.set_custom_reduce_scatter(DefaultReduceScatter())
            module._set_unshard_async_op(False)
            for group in _groups(module):
                group._all_reduce_hook = None

    def finish(self) -> None:
        """Wait for every outstanding reduction and put the gradients in place."""
        self._queued = False
        pending, self._pending = self._pending, []
        for handle in pending:
            handle.wait()
        aside, self._aside = self._aside, {}
        with torch.no_grad():
            for parameter, earlier in aside.items():
                parameter.grad = _sum([*earlier, parameter.grad])

    def gather(self, output: Pieces, input: Pieces, group: dist.ProcessGroup, module: Any) -> Handle:
        """Start an all-gather."""
        if module not in self._order:
            self._order.append(module)
        collectives = self._over(group)
        return self.engine.submit(lambda: collectives.all_gather(output, input))

    def scatter(self, output: Pieces, input: Pieces, module: FSDPModule, average: bool, later: bool) -> None:
        """Start a reduce-scatter, and end it too unless it may end `later`."""
        self._scatter(lambda: self.collectives.reduce_scatter(output, input, average=average), module, later)

    def scatter_compressed(
        self, output: Sequence[Tensor], gradients: Sequence[Tensor], module: FSDPModule, average: bool, later: bool
    ) -> None:
        """The same through the compression; `gradients` still have their rows."""
        compression, size = self.compression, self.collectives.size
        assert compression is not None
        keys = [f"{self.names[cast(nn.Module, module)]}.{index}" for index in range(len(gradients))]
        inputs = [gradient.view(-1) for gradient in gradients]
        widths = [gradient[:1].numel() for gradient in gradients]

        def job() -> None:
            compression.reduce_scatter(output, inputs, keys, widths)
            if not average:
                for part in output:
                    part.mul_(size)

        self._scatter(job, module, later)

    def _scatter(self, job: Callable[[], None], module: FSDPModule, later: bool) -> None:
        later = self._later = later and self._can_wait()
        if later:
            self._put_aside(module)
        else:
            self.finish()  # FSDP2 may add to a gradient that an earlier reduce-scatter is still to fill
        self._end(self.engine.submit(job), later)

    def _all_reduce(self, shard: Tensor) -> None:
        """FSDP2's hook after a reduce-scatter: average over the copies of this shard."""
        assert self.replicate is not None
        replicate = self.replicate
        handle = self.engine.submit(lambda: replicate.all_reduce(shard, average=True))
        self._end(handle, self._later)

    def _end(self, handle: Handle, later: bool) -> None:
        if not later:
            handle.wait()
            return
        self._pending.append(handle)
        if not self._queued and not self.deferred:
            self._queued = True
            Variable._execution_engine.queue_callback(self.finish)

    def _can_wait(self) -> bool:
        return self.engine.threaded and (self.deferred or torch._C._current_graph_task_id() != -1)

    def _put_aside(self, module: FSDPModule) -> None:
        for parameter in _sharded_parameters(module):
            if parameter.grad is not None:
                self._aside.setdefault(parameter, []).append(parameter.grad)
                parameter.grad = None

    def _gather_ahead(self, module: nn.Module, args: Any) -> None:
        """Start the all-gathers of the modules that run after `module`, in the order of the first step.

        Only in training: end of backward clears a gather that was not used, and nothing would do so in evaluation.
        """
        if not torch.is_grad_enabled() or module not in self._order:
            return
        following = self._order[self._order.index(module) + 1 :]
        for later in following[:1] if _frees_parameters(module) else following:
            assert isinstance(later, FSDPModule)
            later.unshard(async_op=True)

    def _over(self, group: dist.ProcessGroup) -> Collectives:
        """The collectives to use where FSDP2 says `group`: ours, or native on the part of it that it names."""
        if group.size() == self.collectives.size:
            return self.collectives
        return Native(group, self.collectives.ledger, self.collectives.axis)


class _AllGather(AllGather):
    def __init__(self, seam: FullySharded, module: FSDPModule) -> None:
        self.seam, self.module = seam, module

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.seam.direct and _gathers_whole(self.module, dtype):
            return Promise(cast(Sequence[int], size), dtype, device, Copies())
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        output: Pieces = output_tensor
        input: Pieces = input_tensor
        if isinstance(output_tensor, Promise):
            input = output_tensor.copies.sources
            output = output_tensor.copies.targets = _destinations(self.module, input, group.size())
        handle = self.seam.gather(output, input, group, self.module)
        if async_op and self.seam.engine.threaded:
            return _Pending(handle)
        handle.wait()
        return None


class _ReduceScatter(ReduceScatter):
    def __init__(self, seam: FullySharded, module: FSDPModule) -> None:
        self.seam, self.module = seam, module
        self._input_next = True

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Called twice for each reduce-scatter: for its input, then for its output."""
        is_input, self._input_next = self._input_next, not self._input_next
        direct = self.seam.direct or self.seam.compression is not None
        if is_input and direct and _scatters_as_is(self.module, dtype):
            return Promise(cast(Sequence[int], size), dtype, device, Copies())
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        average = op == dist.ReduceOp.AVG
        if not average and op != dist.ReduceOp.SUM:
            raise UnsupportedError(
                f"a fully sharded module asks for {op}, which needs FSDP2's own collectives. Call"
                " set_force_sum_reduction_for_comms(True) where you call set_gradient_divide_factor."
            )
        later = average and _only_views_follow(self.module, output_tensor, self.seam)
        if not isinstance(input_tensor, Promise):
            self.seam.scatter(output_tensor, input_tensor, self.module, average, later)
            return None
        size, gradients = group.size(), input_tensor.copies.sources
        input_tensor.copies.sources = []  # FSDP2 keeps the buffer for a while, the gradients may go
        gradients = [_padded(gradient, size, output_tensor.dtype) for gradient in gradients]
        outputs = output_tensor.view(-1).split([gradient.numel() // size for gradient in gradients])
        if self.seam.compression is not None and len(gradients) == _trainable(self.module):
            self.seam.scatter_compressed(outputs, gradients, self.module, average, later)
        elif self.seam.direct:
            self.seam.scatter(outputs, gradients, self.module, average, later)
        else:
            whole = torch.cat([gradient.view(size, -1) for gradient in gradients], dim=1)
            self.seam.scatter(output_tensor, whole, self.module, average, later)
        return None


class _Pending(dist.Work):
    """What FSDP2 waits for before it copies gathered parameters out (it asks for this very type)."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._handle = handle

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._handle.wait()
        return True


def _groups(module: FSDPModule) -> list[Any]:
    """The parameter groups of one module (torch 2.13 has a list, torch 2.11 one or none)."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in [state._fsdp_param_group] if group is not None]


def _sharded_parameters(module: FSDPModule) -> Iterator[nn.Parameter]:
    for group in _groups(module):
        for parameter in group.fsdp_params:
            yield parameter.sharded_param


def _gathers_whole(module: FSDPModule, dtype: torch.dtype) -> bool:
    """Whether each gathered parameter is one tensor that starts as its shards in rank order, all of one dtype."""
    (group,) = _groups(module)
    return (
        dtype != torch.uint8  # mixed dtypes travel as bytes
        and not group.is_sharded_post_forward  # a part of the ranks
        and all(
            parameter.fsdp_placement.dim == 0 and not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
            for parameter in group.fsdp_params
        )
    )


def _destinations(module: FSDPModule, shards: Sequence[Tensor], size: int) -> list[Tensor]:
    """The memory of the gathered parameters; FSDP2 would take it when it copies out, we take it before the gather."""
    (group,) = _groups(module)
    targets = []
    for parameter, shard in zip(group.fsdp_params, shards, strict=True):
        parameter.init_all_gather_outputs([shard.numel()], [shard.dtype], size, shard.device)
        parameter.alloc_all_gather_outputs()
        targets.append(parameter.all_gather_outputs[0].data)  # .data: autograd must not see a new version
    return targets


def _scatters_as_is(module: FSDPModule, dtype: torch.dtype) -> bool:
    """Whether FSDP2 does nothing to the gradients on the way into the buffer, such as dividing (half types)."""
    (group,) = _groups(module)
    return dtype in (torch.float32, torch.bfloat16) and group._reduce_scatter_process_group.size() > 1


def _padded(gradient: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """`gradient` with zero rows added until `size` divides them; without a copy where none are missing."""
    rows = gradient.to(dtype).contiguous().view(gradient.shape or (1,))
    missing = -rows.shape[0] % size
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _trainable(module: FSDPModule) -> int:
    return sum(parameter.requires_grad for parameter in _sharded_parameters(module))


def _only_views_follow(module: FSDPModule, output: Tensor, seam: FullySharded) -> bool:
    """Whether FSDP2 computes nothing from the output of a reduce-scatter (see the note at the top)."""
    for group in _groups(module):
        if group._orig_dtype != output.dtype or isinstance(group.mesh_info, DDPMeshInfo):
            return False
        if group._all_reduce_hook is not None and group._all_reduce_hook != seam._all_reduce:
            return False
    return not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in _sharded_parameters(module))


def _frees_parameters(module: nn.Module) -> bool:
    assert isinstance(module, FSDPModule)
    return any(group._reshard_after_forward for group in _groups(module))


def _sum(gradients: list[Tensor | None]) -> Tensor:
    """All of `gradients` added to the first one."""
    total, *others = [gradient for gradient in gradients if gradient is not None]
    for other in others:
        assert isinstance(total, DTensor)
        assert isinstance(other, DTensor)
        total.to_local().add_(other.to_local())
    return total
