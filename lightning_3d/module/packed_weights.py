"""Frozen weights in 8 or 4 bits, as quantisation packages store them (read in bitsandbytes 0.50 and torchao 0.18)."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

PACKED_KINDS = "4 bits of bitsandbytes (Linear4bit, nf4 or fp4)"
"""Those whose rows are divided."""


def is_packed(parameter: Tensor) -> bool:
    """Return True for a weight that a package has quantised: a tensor class of its own, 4 bits, or integers.

    4 bits may be stored as floating point, by `bnb_4bit_quant_storage`.
    """
    outside = type(parameter).__module__.partition(".")[0] not in ("torch", "lightning_3d")
    four_bits = getattr(parameter, "quant_state", None) is not None
    return wraps_tensors(parameter) or four_bits or (outside and not parameter.is_floating_point())


def wraps_tensors(tensor: Tensor) -> bool:
    return hasattr(type(tensor), "__tensor_flatten__") and not isinstance(tensor, DTensor)


def is_whole(parameter: Tensor) -> bool:
    """Return True for a packed weight that has no rows to divide.

    The 8 bits of bitsandbytes are in a second attribute of their layer too. A tensor of torchao has no view as rows.
    """
    return is_packed(parameter) and getattr(parameter, "quant_state", None) is None


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with values of `tensor`, which is one itself unless a class wraps several."""
    if not wraps_tensors(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from plain_tensors(getattr(tensor, name))


def value_bytes(tensor: Tensor) -> int:
    """Bytes of the values of `tensor`. A class that wraps several has the data type of none."""
    return sum(plain.nbytes for plain in plain_tensors(tensor))


def scales(module: nn.Module) -> list[Tensor]:
    """The tensors that unpack weights of 4 bits, each once. They are no parameters, and every rank has all of them."""
    layers = [(part, weight) for part in module.modules() for weight in part._parameters.values()]
    states = [getattr(weight, "quant_state", None) or getattr(part, "quant_state", None) for part, weight in layers]
    states += [getattr(state, "state2", None) for state in states]
    found = [value for state in states if hasattr(state, "__dict__") for value in vars(state).values()]
    return list({id(tensor): tensor for tensor in found if isinstance(tensor, Tensor)}.values())
