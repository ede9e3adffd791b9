"""Checks before the module is placed, on every rank, so that all raise together and none waits."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelPruning, StochasticWeightAveraging
from torch import Tensor, nn
from torch import distributed as dist
from torch.jit import ScriptModule
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_3d.errors import ConfigurationError, LayoutError, UnsupportedError
from lightning_3d.layout import Layout
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.module.packed_weights import PARTS_OF_SPARSE
from lightning_3d.module.step_check import Args, StepCheck
from lightning_3d.module.torch_private import grad_hooks, in_wrapper, is_compiled, is_compiled_in_place, own_parameters
from lightning_3d.ranks import agreement, talk
from lightning_3d.sandbox.fingerprint import is_absent
from lightning_3d.sandbox.interceptor import overlap, storage
from lightning_3d.sandbox.snapshot import own
from lightning_3d.sandbox.trial import entries_of
from lightning_3d.strategy.one_run import Run


def check_same_layout(make: Callable[[], Layout], world_size: int) -> Layout:
    """The layout of `make()`, if it is possible and equal on every rank. Collective."""
    running = dist.get_world_size()
    if running != world_size:
        raise LayoutError(
            f"the Trainer was given {world_size} processes (devices x num_nodes), but the process group that is already"
            f" running has {running}: it is left over from an earlier job in this process, or of a launcher. Call"
            " torch.distributed.destroy_process_group() between two jobs, or start each job in its own process. Under"
            " Ray give the Trainer plugins=[RayLightningEnvironment()]."
        )
    layout = agreement.together(make, LayoutError)
    if talk.all_equal(repr(layout)):
        return layout
    layouts = talk.gather(repr(layout))
    for rank, other in enumerate(layouts):
        if other != layouts[0]:
            raise LayoutError(
                f"rank {rank} was given another layout than rank 0.\nrank 0: {layouts[0]}\nrank {rank}: {other}\n"
                "Every process must build the same Strategy3D."
            )
    return layout


def check_same_module(module: nn.Module) -> None:
    """Raise on every rank unless all have built the same parameters and buffers. Collective over the world.

    Collectives on short tensors accept tensors of other shapes: ranks would train to the end with other weights.
    """
    mine = _tensors(module)
    if talk.all_equal(mine):
        return
    modules = talk.gather(mine)
    others = [rank for rank, tensors in enumerate(modules) if tensors != modules[0]]
    if not others:
        return
    first, there = modules[0], modules[others[0]]
    line = next(n for n, (here, other) in enumerate(zip_longest(first, there)) if here != other)
    odd = ", ".join(map(str, others[:8])) + (", ..." if others[8:] else "")
    raise ConfigurationError(
        f"rank {odd} built another {type(module).__name__} than rank 0. The first difference:\n"
        f"rank 0: {_line(first, line)}\nrank {others[0]}: {_line(there, line)}\n"
        "Ranks would average weights that do not belong together. Build the same module in every process: its sizes and"
        " frozen parameters must not depend on the rank, on random numbers without a seed, or on files that only some"
        " machines have."
    )


def _tensors(module: nn.Module) -> list[str]:
    """A line for each parameter and buffer: name, data type, shape, trained or frozen, tied to which other."""
    names: dict[Tensor, str] = {}
    lines = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        trained = "trained" if parameter.requires_grad else "frozen"
        tied = f", tied to {names[parameter]!r}" if parameter in names else ""
        lines.append(f"parameter {name!r}, {_kind(parameter)}, {trained}{tied}")
        names.setdefault(parameter, name)
    lines += [f"buffer {name!r}, {_kind(buffer)}" for name, buffer in module.named_buffers(remove_duplicate=False)]
    return lines


def _kind(tensor: Tensor) -> str:
    shape = "no shape yet" if isinstance(tensor, UninitializedParameter | UninitializedBuffer) else [*tensor.shape]
    count = f" with {tensor._nnz()} values" if tensor.layout in PARTS_OF_SPARSE else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}{count}"


def _line(lines: list[str], number: int) -> str:
    return lines[number] if number < len(lines) else f"nothing after {len(lines)} parameters and buffers"


def check_module(module: nn.Module, fitting: bool) -> None:
    """Raise for a module that cannot be trained in this layout."""
    lazy = [
        name
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer)
    ]
    if lazy:
        raise ConfigurationError(
            f"{type(module).__name__} has {len(lazy)} lazy parameters without a shape yet ({lazy[0]}, ...). Run one"
            " forward, for example in setup(), so that every rank knows the shapes before they are placed."
        )
    for name, parameter in module.named_parameters():
        if type(parameter).__module__.startswith("lightning_3d."):  # in shards, or not built yet
            continue
        try:
            parameter.detach().numel()
        except Exception as error:  # of its class: hypll's
            raise ConfigurationError(
                f"{name} is a {type(parameter).__name__}, which refuses operations of torch ({error}), and ranks move"
                " and compare values. Keep an nn.Parameter, and make the other object of it in forward."
            ) from error
    if fitting and next(module.parameters(), None) is None:
        raise ConfigurationError(
            f"{type(module).__name__} has no parameters. Assign layers in __init__ or configure_model()."
        )


def check_user_code(run: Run) -> None:
    """Refuse what cannot work in this layout."""
    if run.fitting:
        if run.in_shards is None:  # else our own hooks are there too
            HookCheck(run.module, run.chosen).before_train()
        check_callbacks(run.callbacks, run.module, run.chosen)
        check_reports(run.callbacks, run.settings.async_checkpoint)
    check_compiled(run.module, run.chosen)


def check_compiled(module: nn.Module, layout: Layout) -> None:
    """Raise for modules that are compiled with the hooks that run or gather blocks, where their graphs would be wrong.

    A pipeline takes no such module. With ZeRO the hooks of one block read the states of all, which torch's compiler
    cannot follow where another block is in its wrapper.
    """
    if not (layout.pipelined or layout.shards_data) or not any(map(is_compiled, module.modules())):
        return
    chains = Anatomy.of(module).chains
    blocks = [block for chain in chains for block in chain.blocks]
    around = f"{chains[0].name}." if chains else ""  # names of all modules with the blocks begin it
    wrapped = next((block for block in blocks if in_wrapper(module.get_submodule(block)) is not None), None)
    for name, inner in module.named_modules():
        in_place = is_compiled_in_place(inner)
        outside = in_wrapper(inner) is not None and around.startswith(f"{name}.")
        how = f"{name or type(module).__name__} is compiled {'by its own compile()' if in_place else 'as a whole'}"
        if layout.pipelined and (in_place or outside):
            raise UnsupportedError(
                f"{how}, together with the hooks inside. A pipeline decides in a hook of each block whether its stage"
                f" computes it ({layout}). Compiled code would repeat the decisions of the first step. Wrap the blocks"
                " instead: blocks[i] = torch.compile(blocks[i])."
            )
        holds = in_place and (not name or name in blocks or around.startswith(f"{name}."))
        if layout.shards_data and wrapped is not None and (outside or holds):
            raise UnsupportedError(
                f"{how}, and {wrapped} is what torch.compile() returned. With ZeRO ({layout}) the first one's graph has"
                " hooks that read where the weights of the second one are, which torch cannot compile. Compile all"
                " blocks in one way and nothing around them: blocks[i] = torch.compile(blocks[i]), or"
                " blocks[i].compile()."
            )


def check_modules(module: nn.Module, layout: Layout) -> None:
    """Raise for TorchScript, and for a module that lists parameters by a method of its own, as TorchRL's losses do."""
    for name, part in module.named_modules() if layout.holds_parts else ():
        who = f"{name or type(module).__name__} ({type(part).__name__})"
        if isinstance(part, ScriptModule):
            raise UnsupportedError(
                f"{who} is a module of TorchScript. Its code runs outside of Python, where ranks cannot give it their"
                f" parts of parameters ({layout}). Leave out torch.jit.script or torch.jit.trace for modules (a"
                " function may be scripted), or use zero_stage=0 with data ranks alone."
            )
        its = type(part).named_parameters is not nn.Module.named_parameters and (layout.shards_data or layout.pipelined)
        taken = {} if not its else inspect.signature(part.named_parameters).parameters
        any_name = "remove_duplicate" in taken or any(each.kind is each.VAR_KEYWORD for each in taken.values())
        if its and not any_name:
            raise UnsupportedError(
                f"{who} has a method named_parameters of its own that cannot list a parameter under all of its names."
                f" Ranks have parts of parameters here ({layout}), and must know every place of each. Use zero_stage=0"
                " with data ranks alone."
            )


def check_shared_memory(module: nn.Module, layout: Layout) -> None:
    """Raise for a tensor that has the memory of a parameter: ranks have parts of that, in other memory."""
    if not layout.holds_parts:
        return
    known: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers(), *_attributes(module)]:
        if type(tensor) not in (Tensor, nn.Parameter) or is_absent(tensor) or not tensor.numel():
            continue
        others = known.setdefault(storage(tensor), [])
        for before, other in others:
            if isinstance(other, nn.Parameter) and tensor is not other and overlap(tensor, other):
                raise UnsupportedError(
                    f"{before} and {name} have one memory, as `b.data = a.data` makes it. On one device a"
                    f" change of one is a change of both; here ranks have parts of {before} ({layout}), so that"
                    " they would become different. Make them one parameter (b.weight = a.weight), or make a copy"
                    " (a.data.clone()). If they have other shapes, or PEFT makes them (ensure_weight_tying=True), use"
                    " zero_stage=0 with data ranks alone."
                )
        others.append((name, tensor))


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, part in module.named_modules():
        by_spectral_norm = {each.rpartition("_")[0] for each in own_parameters(part) if each.endswith("orig")}
        for key, value in own(part).items():
            tensors = [each for each in entries_of(value) if isinstance(each, Tensor)]
            if key not in by_spectral_norm:
                yield from ((f"{name}.{key}".strip("."), each) for each in tensors)


class HookCheck(StepCheck):
    """Refuses hooks on parameters that are sharded: at set-up, and those that are added until the second batch."""

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self.module, self.layout, self.batches = module, layout, 2

    def before_train(self, args: Args = ()) -> None:
        self.batches -= 1
        if self.batches >= 0 and self.layout.holds_parts:
            agreement.together(self._refuse, UnsupportedError)  # a logger may watch the module of rank 0 alone

    def _refuse(self) -> None:
        for name, parameter in self.module.named_parameters():
            hooks = [each for late in (False, True) for each in grad_hooks(parameter, late=late).values()]
            if not all(str(each.__module__).startswith("lightning_3d") for each in hooks):
                raise UnsupportedError(
                    f"{name} has a hook for its gradient (register_hook or register_post_accumulate_grad_hook). The"
                    f" gradient is sharded ({self.layout}), so the hook would get another tensor than on one device, or"
                    " none. Change gradients in on_after_backward or on_before_optimizer_step instead, by operations on"
                    " each element. A mask belongs in a parametrization: torch.where(mask, weight, weight.detach())."
                )


def check_callbacks(callbacks: Sequence[Callback], module: LightningModule, layout: Layout) -> None:
    """Raise for a callback that computes with all values of a parameter where ranks have shards."""
    for callback in callbacks:
        if isinstance(callback, ModelPruning) and layout.holds_parts:
            raise UnsupportedError(
                f"{type(callback).__name__} chooses weights by all values of a parameter, of which a rank has only a"
                f" shard ({layout}): it would prune other weights than one device. Use data ranks with zero_stage=0."
            )
        swa = isinstance(callback, StochasticWeightAveraging) and callback.pl_module_contains_batch_norm(module)
        if swa and layout.holds_parts:
            raise UnsupportedError(
                "StochasticWeightAveraging computes the statistics of BatchNorm anew in an epoch without backward."
                f" Where ranks have shards ({layout}) such an epoch would leave gathered weights or gradients behind."
                " Use WeightAveraging or EMAWeightAveraging, which average the statistics, or zero_stage=0."
            )


def check_reports(callbacks: Sequence[object], asynchronous: bool) -> None:
    """Raise for Ray's callback, which uploads a checkpoint as soon as it is saved, where saving goes on meanwhile."""
    for callback in callbacks if asynchronous else ():
        if any(kind.__name__ == "RayTrainReportCallback" for kind in type(callback).__mro__):
            raise UnsupportedError(
                f"{type(callback).__name__} uploads a checkpoint as soon as trainer.save_checkpoint returns. With"
                " async_checkpoint=True only half is uploaded, and a restart fails. Use async_checkpoint=False."
            )
