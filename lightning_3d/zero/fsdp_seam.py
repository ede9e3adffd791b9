"""The seam into FSDP2: our collectives under `fully_shard`, in the background, without streams.

FSDP2 overlaps messages with computing by streams. A CPU has no streams: there its reduce-scatter blocks backward, and
its all-gather blocks forward. Our collectives return at once and finish in the engine's thread.

[Note: deferred reduce-scatter] After a reduce-scatter `foreach_reduce` usually makes views of the output and puts them
into `.grad`. It computes nothing from the output, so the output may be filled later. `FullySharded.finish` runs at the
end of backward and waits for it.

In five cases `foreach_reduce` computes from the output. It divides afterwards (fp16), casts to another dtype, reduces
over a second mesh axis (HSDP), calls a user's hook, or adds to an older gradient. The older gradient is saved and added
at the end. In the other cases we wait at once.

[Note: unallocated buffers] FSDP2 copies gradients into a buffer before the reduce-scatter. It copies parameters into
one before the all-gather, and out of another after it. On a CPU these copies cost as much as sending. The buffers come
from `Comm.allocate`, which is ours. For a ring, which can send several tensors at once, it returns an
`UnallocatedBuffer`: a tensor without memory that records what FSDP2 copies into it. The ring then works on the
gradients and parameters themselves.

What is private in FSDP2 is used in the `*_private.py` files beside this one.
"""

import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.axes.group import Group
from lightning_3d.axes.ring import Pieces
from lightning_3d.comm.background_queue import BackgroundQueue, Handle
from lightning_3d.comm.compression import Compression
from lightning_3d.module.torch_private import at_end_of_backward, in_backward
from lightning_3d.zero import fsdp_private
from lightning_3d.zero.rows import padded


class CopyNotes:
    """The tensors that were copied into an unallocated buffer, and those that have its contents already."""

    def __init__(self) -> None:
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []


class UnallocatedBuffer(torch.Tensor):
    """Has the shape, dtype and device of a buffer, and a `CopyNotes` in place of its contents.

    Knows the three operations by which FSDP2 fills and empties its buffers (read in torch 2.13); any other raises.
    """

    copies: CopyNotes

    @staticmethod
    def __new__(
        cls, size: Sequence[int], dtype: torch.dtype, device: torch.device, copies: CopyNotes
    ) -> "UnallocatedBuffer":
        buffer = torch.Tensor._make_wrapper_subclass(cls, tuple(size), dtype=dtype, device=device)
        buffer.copies = copies
        return buffer

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        kwargs = kwargs or {}
        if func is torch.ops.aten.view.default:
            buffer, (rows, rest) = args
            assert rest == -1
            return cls((rows, buffer.numel() // rows), *buffer._like())
        if func.name().startswith("fsdp::chunk_cat"):  # torch 2.15 has one more, for several dtypes
            kwargs["out"].copies.sources = list(args[0])
            return None
        if func is torch.ops.fsdp.all_gather_copy_in.default:
            sources, buffer = args[:2]
            buffer.copies.sources = list(sources)
            return cls((args[3],), *buffer._like()), cls(buffer.shape, *buffer._like())
        if func is torch.ops.fsdp.split_with_sizes_copy.default:
            # Nothing is left to copy where the gather wrote to these very tensors.
            for target, tensor in zip(args[0].copies.targets, kwargs["out"], strict=True):
                if target.data_ptr() != tensor.data_ptr():
                    raise NotImplementedError(
                        "FSDP2 wants gathered parameters elsewhere: this version of torch is not known."
                    )
            return None
        raise NotImplementedError(f"FSDP2 did {func} with an unallocated buffer: this version of torch is not known.")

    def _like(self) -> tuple[torch.dtype, torch.device, CopyNotes]:
        return self.dtype, self.device, self.copies

    def __repr__(self) -> str:  # type: ignore[override]
        return f"UnallocatedBuffer({tuple(self.shape)})"


class FullySharded:
    """Our collectives attached to every `fully_shard`-ed module under `root`.

    Args:
        collectives: over the ranks of the shard axis, on a group that nothing else uses.
        replicate: over the ranks that have the same shard (hybrid shard).
        native_copies: the mesh of the shards is 2-D. FSDP2 averages over `replicate` itself, by the library's
            all-reduce, and is only counted here. Otherwise the mesh is 1-D.
        compression: for the reduce-scatters, over the same ranks. The keys of its memory are module name and position.
        others: the collectives of modules that are sharded over other ranks.

    At the end of backward all gradients are there. Outside of one, as in a pipeline, each reduce-scatter blocks.
    """

    def __init__(
        self,
        root: nn.Module,
        collectives: Group,
        engine: BackgroundQueue,
        replicate: Group | None = None,
        *,
        native_copies: bool = False,
        compression: Compression | None = None,
        others: Mapping[nn.Module, Group] | None = None,
    ) -> None:
        self.collectives, self.engine, self.replicate = collectives, engine, replicate
        self.compression, self.others = compression, others or {}
        self.direct = engine.threaded and collectives.takes_pieces and collectives.size > 1
        self.names = {module: name for name, module in root.named_modules()}
        self.sequence = 0
        """A checksum of the gathers and reductions so far, in their order."""
        self.modules = [module for module in root.modules() if fsdp_private.groups_at(module)]
        self.one_ahead = any(map(fsdp_private.frees_parameters, self.modules))
        """True where a module's gather starts no earlier than with the call of the one before."""
        self.order: list[nn.Module] = []
        """The modules in the order in which they were first gathered."""
        self._pending: list[Handle] = []
        self._saved: dict[nn.Parameter, list[Tensor]] = {}
        self._kept: list[Tensor] = []
        """Shards that are averaged over their copies until `finish`."""
        self._queued = False
        self._later = False
        self._hooks = []
        over_copies = None if replicate is None else replicate.count_all_reduce if native_copies else self._all_reduce
        for module in self.modules:
            for group in fsdp_private.groups_at(module):
                gather, scatter = _AllGather(self, module, group), _ReduceScatter(self, module, group)
                fsdp_private.install(group, gather, scatter, over_copies, engine.threaded)
            if engine.threaded:
                self._hooks.append(module.register_forward_pre_hook(self._gather_ahead))

    def __deepcopy__(self, memo: Any) -> "FullySharded":
        return self  # a copied module's hooks point here

    def key(self, module: nn.Module, place: int) -> str:
        """Return the key of the compression's memory for a parameter of `module`'s group."""
        return f"{self.names[module]}.{place}"

    def detach(self) -> None:
        """Start no gather any more, and end every reduction."""
        self.finish()
        for hook in self._hooks:
            hook.remove()

    def finish(self) -> None:
        """Wait for every outstanding reduction and put the gradients in place."""
        self._kept = []
        self._finish()

    def _finish(self) -> None:
        self._queued = False
        pending, self._pending = self._pending, []
        for handle in pending:
            handle.wait()
        saved, self._saved = self._saved, {}
        with torch.no_grad():
            for parameter, earlier in saved.items():
                parameter.grad = fsdp_private.added([*earlier, parameter.grad])

    def of(self, module: nn.Module) -> Group:
        """Return the collectives over the ranks that share `module`."""
        return self.others.get(module, self.collectives)

    def _note(self, what: str, module: nn.Module) -> str:
        """Add a gather or a reduction to the checksum, and return what it is for, in words."""
        doing = f"the {what} of {self.names[module] or 'what is outside of blocks'}"
        self.sequence = zlib.crc32(doing.encode(), self.sequence)
        return doing

    def _submit(self, job: Callable[[], None], over: Group, name: str, doing: str) -> Handle:
        """Submit a collective. A ring compares what it is for, `doing`, with what the neighbour's is for."""
        wire = over.wire

        def announced() -> None:
            if wire is not None:
                wire.doing = doing
            job()

        return self.engine.submit(announced, f"{name} on {over.axis}")

    def meet(self, doing: str) -> None:
        """Raise where another rank is elsewhere in its step and would not come. Collective; not on cards."""
        if (wire := self.collectives.wire) is not None and self.engine.threaded:
            self._submit(wire.meet, self.collectives, "meeting", doing).wait()

    def gather(self, output: Pieces, input: Pieces, group: dist.ProcessGroup, module: Any) -> Handle:
        if module not in self.order:
            self.order.append(module)
        collectives = self._over(group, self.of(module))
        doing = self._note("gather", module)
        return self._submit(lambda: collectives.all_gather(output, input), collectives, "all_gather", doing)

    def scatter(self, unit: "_ReduceScatter", output: Pieces, input: Pieces, average: bool, later: bool) -> None:
        """Start a reduce-scatter, and end it too unless it may end `later`."""
        self._scatter(unit, lambda: unit.over.reduce_scatter(output, input, average=average), unit.over, later)

    def scatter_compressed(
        self, unit: "_ReduceScatter", output: Any, gradients: Sequence[Tensor], places: Any, average: bool, later: bool
    ) -> None:
        """Start a reduce-scatter through the compression; `gradients` still have their rows."""
        compression, size = self.compression, self.collectives.size
        assert compression is not None
        keys = [self.key(unit.module, place) for place in places]
        inputs = [gradient.view(-1) for gradient in gradients]
        widths = [gradient[:1].numel() for gradient in gradients]

        def job() -> None:
            compression.reduce_scatter(output, inputs, keys, widths)
            if not average:
                for part in output:
                    part.mul_(size)

        self._scatter(unit, job, self.collectives, later)

    def _scatter(self, unit: "_ReduceScatter", job: Callable[[], None], over: Group, later: bool) -> None:
        later = self._later = later and self.engine.threaded and in_backward()
        if later:
            for parameter in fsdp_private.sharded_parameters(unit.group):
                if parameter.grad is not None:
                    self._saved.setdefault(parameter, []).append(parameter.grad)
                    parameter.grad = None
        else:
            self._finish()  # FSDP2 may add to a gradient that an earlier reduce-scatter is still to fill
        self._end(self._submit(job, over, "reduce_scatter", self._note("reduction", unit.module)), later)

    def _all_reduce(self, shard: Tensor) -> None:
        """FSDP2's hook after a reduce-scatter: average over the copies of this shard."""
        assert self.replicate is not None
        replicate = self.replicate
        if not self.engine.threaded:
            # FSDP2 drops it after it has added it to a gradient. The next reduce-scatter, on another stream, would get
            # its memory while this all-reduce runs.
            self._kept.append(shard)
        name = f"all_reduce on {replicate.axis}"
        handle = self.engine.submit(lambda: replicate.all_reduce(shard, average=True), name)
        self._end(handle, self._later)

    def _end(self, handle: Handle, later: bool) -> None:
        if not later:
            handle.wait()
            return
        self._pending.append(handle)
        if not self._queued:
            self._queued = True
            at_end_of_backward(self.finish)

    def _gather_ahead(self, module: nn.Module, args: Any) -> None:
        """Start the all-gathers of the modules that run after `module`, in the order of the first step.

        Only in training: end of backward clears a gather that was not used, and nothing would do so in evaluation.
        Not in backward, where activation checkpointing calls modules again.
        """
        if not torch.is_grad_enabled() or in_backward() or module not in self.order:
            return
        following = self.order[self.order.index(module) + 1 :]
        for later in following[:1] if self.one_ahead else following:
            for group in fsdp_private.groups_at(later):
                group.unshard(async_op=True)

    def _over(self, group: dist.ProcessGroup, ours: Group) -> Group:
        """Return the collectives to use where FSDP2 names `group`: ours, or the library's on those ranks."""
        return ours if group.size() == ours.size else Group(group, ours.axis, ours.ledger, doing=ours.doing)


class _AllGather(fsdp_private.AllGather):
    def __init__(self, seam: FullySharded, module: nn.Module, group: Any) -> None:
        self.seam, self.module, self.group = seam, module, group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.seam.direct and fsdp_private.gathers_whole(self.group, dtype):
            return UnallocatedBuffer(cast(Sequence[int], size), dtype, device, CopyNotes())
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        output: Pieces = output_tensor
        input: Pieces = input_tensor
        if isinstance(output_tensor, UnallocatedBuffer):
            input = output_tensor.copies.sources
            output = output_tensor.copies.targets = fsdp_private.destinations(self.group, input, group.size())
        handle = self.seam.gather(output, input, group, self.module)
        if async_op and self.seam.engine.threaded:
            return _Pending(handle)
        handle.wait()
        return None


class _ReduceScatter(fsdp_private.ReduceScatter):
    def __init__(self, seam: FullySharded, module: nn.Module, group: Any) -> None:
        self.seam, self.module, self.group, self.over = seam, module, group, seam.of(module)
        self._awaited: int | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Called twice for each reduce-scatter: for its input, then for its output, N times shorter."""
        numel = math.prod(map(int, size))
        is_input = numel != self._awaited
        self._awaited = numel // self.over.size if is_input else None
        direct = self.seam.direct or self.seam.compression is not None
        if is_input and direct and fsdp_private.scatters_as_is(self.group, dtype):
            return UnallocatedBuffer(cast(Sequence[int], size), dtype, device, CopyNotes())
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        average = op == dist.ReduceOp.AVG
        assert average or op == dist.ReduceOp.SUM  # nobody can set a factor: classes of modules are their own
        later = average and fsdp_private.only_views_follow(self.group, output_tensor, self.seam._all_reduce)
        if not isinstance(input_tensor, UnallocatedBuffer):
            self.seam.scatter(self, output_tensor, input_tensor, average, later)
            return None
        size, gradients = group.size(), input_tensor.copies.sources
        input_tensor.copies.sources = []  # FSDP2 keeps the buffer for a while, the gradients may go
        gradients = [padded(gradient, size, output_tensor.dtype) for gradient in gradients]
        outputs = output_tensor.view(-1).split([gradient.numel() // size for gradient in gradients])
        places = fsdp_private.trainable(self.group)
        if self.seam.compression is not None and len(gradients) == len(places):
            self.seam.scatter_compressed(self, outputs, gradients, places, average, later)
            return None
        if self.seam.compression is not None:
            warnings.warn(
                f"{len(gradients)} of {len(places)} parameters of a sharded module have a gradient in a backward that"
                " code calls by itself. Which ones is not known here, so they are sent uncompressed this time.",
                stacklevel=2,
            )
        if self.seam.direct:
            self.seam.scatter(self, outputs, gradients, average, later)
        else:
            joined = torch.cat([gradient.view(size, -1) for gradient in gradients], dim=1)
            self.seam.scatter(self, output_tensor, joined, average, later)
        return None


class _Pending(dist.Work):
    """A gather for which FSDP2 waits before it copies parameters out (it asks for this very type)."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self._handle = handle

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._handle.wait()
        return True
