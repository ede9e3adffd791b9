"""Frozen weights in 8 or 4 bits, as quantisation packages store them (read in bitsandbytes 0.50 and torchao 0.18)."""

from collections.abc import Iterable, Iterator

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.errors import UnsupportedError
from lightning_3d.layout import Layout
from lightning_3d.module.amounts import show_bytes
from lightning_3d.module.torch_private import own_parameters

PACKED_KINDS = "4 bits of bitsandbytes (Linear4bit, nf4 or fp4)"
"""Those whose rows are divided."""
PARTS_OF_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
"""Layout of a sparse tensor, such as the edges of a graph -> its methods that give plain tensors of its memory."""


def is_packed(parameter: Tensor) -> bool:
    """Return True for a weight that a package has quantised: a tensor class of its own, 4 bits, or integers.

    4 bits may be stored as floating point, by `bnb_4bit_quant_storage`.
    """
    four_bits = getattr(parameter, "quant_state", None) is not None
    return wraps_tensors(parameter) or four_bits or (_is_foreign(parameter) and not parameter.is_floating_point())


def is_special(parameter: Tensor) -> bool:
    """Return True for a parameter of a class that a package has made for its optimizer: geoopt's on a manifold.

    A shard would not have the class, so that the optimizer would step otherwise.
    """
    return _is_foreign(parameter) and isinstance(parameter, nn.Parameter) and not is_packed(parameter)


def _is_foreign(parameter: Tensor) -> bool:
    kind = getattr(parameter, "lightning_3d_class", type(parameter))  # a dry run has parameters of another one
    return kind.__module__.partition(".")[0] not in ("torch", "lightning_3d")


def wraps_tensors(tensor: Tensor) -> bool:
    return hasattr(type(tensor), "__tensor_flatten__") and not isinstance(tensor, DTensor)


def is_whole(parameter: Tensor) -> bool:
    """Return True for a packed weight that has no rows to divide.

    The 8 bits of bitsandbytes are in a second attribute of their layer too. A tensor of torchao has no view as rows.
    """
    return is_packed(parameter) and getattr(parameter, "quant_state", None) is None


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with values of `tensor`, which is one itself unless it is sparse or a class wraps several."""
    if tensor.layout in PARTS_OF_SPARSE:
        yield from (getattr(tensor, name)() for name in PARTS_OF_SPARSE[tensor.layout])
        return
    if not wraps_tensors(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from plain_tensors(getattr(tensor, name))


def value_bytes(tensor: Tensor) -> int:
    """Bytes of the values of `tensor`, and of its indices if it is sparse. A class of several has no data type."""
    return sum(plain.numel() * plain.element_size() for plain in plain_tensors(tensor))


def scales(module: nn.Module) -> list[Tensor]:
    """The tensors that unpack weights of 4 bits, each once. They are no parameters, and every rank has all of them."""
    layers = [(part, weight) for part in module.modules() for weight in own_parameters(part).values()]
    states = [getattr(weight, "quant_state", None) or getattr(part, "quant_state", None) for part, weight in layers]
    states += [getattr(state, "state2", None) for state in states]
    found = [value for state in states if hasattr(state, "__dict__") for value in vars(state).values()]
    return list({id(tensor): tensor for tensor in found if isinstance(tensor, Tensor)}.values())


def check_packed(module: nn.Module, layout: Layout) -> None:
    """Raise for quantised weights that this layout cannot divide, and name those that are on every rank."""
    packed = {name: type(weight).__name__ for name, weight in module.named_parameters() if is_packed(weight)}
    if packed and layout.pipelined:
        name, kind = next(iter(packed.items()))
        raise UnsupportedError(
            f"{name} and {len(packed) - 1} more are quantised ({kind}; {layout}). A layer adds its scales to a"
            " checkpoint only where its weight is, so stages would save other names, and the checkpoint could not be"
            " read. Use data ranks, and for 4 bits tensor ranks."
        )
    repack = [name for name, part in module.named_modules() if getattr(part, "support_avx512bf16_for_cpu", False)]
    if repack and layout.holds_parts and next(module.parameters()).device.type == "cpu":
        raise UnsupportedError(
            f"{repack[0]} and {len(repack) - 1} more pack their 4 bits anew for this CPU outside of train mode"
            f" (bitsandbytes, AVX512-BF16; {layout}). They write to weights that are in shards. Set"
            " support_avx512bf16_for_cpu = False on each of these layers, on one device too."
        )
    whole = {name: weight for name, weight in module.named_parameters() if is_whole(weight)}
    if not whole or not layout.holds_parts:
        return
    name, weight = next(iter(whole.items()))
    kind, more = type(weight).__name__, f" and {len(whole) - 1} more" if len(whole) > 1 else ""
    if layout.tensor_parallel_size > 1:
        raise UnsupportedError(
            f"{name}{more} are quantised as {kind} ({layout}). Their layer keeps the values a second time or writes to"
            f" them. Use data ranks alone, which have all of these, or {PACKED_KINDS}."
        )
    rank_zero_warn(
        f"{name}{more} are quantised as {kind}, which ZeRO does not divide: every rank has all of them"
        f" ({show_bytes(sum(map(value_bytes, whole.values())))}). It divides {PACKED_KINDS}."
    )


def check_saved(module: nn.Module, buffers: Iterable[tuple[str, Tensor]] = (), *, sharded: bool) -> None:
    """Raise for what cannot be saved sharded, and warn of weights of which one file cannot be read to resume."""
    for name, buffer in buffers if sharded else ():
        if buffer.layout in PARTS_OF_SPARSE:
            raise UnsupportedError(
                f'{name} is a sparse tensor, which cannot be saved sharded. Use checkpoint_format="full"; or, where'
                " code makes it anew, register_buffer(..., persistent=False)."
            )
    wrapped = {name: type(weight).__name__ for name, weight in module.named_parameters() if wraps_tensors(weight)}
    if not wrapped:
        return
    name, kind = next(iter(wrapped.items()))
    which = f"{name} and {len(wrapped) - 1} more are of the tensor class {kind}"
    if sharded:
        raise UnsupportedError(
            f'{which}, which cannot be saved sharded. Use checkpoint_format="full": `lightning-3d export --adapters`'
            " reads the adapters of its checkpoints, but no run can resume from them."
        )
    rank_zero_warn(
        f"{which}. A run cannot resume from a checkpoint of these, of which `lightning-3d export --adapters` reads the"
        " adapters. Quantise by bitsandbytes to resume."
    )
