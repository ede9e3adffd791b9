"""Tensors whose values code cannot use as they are: parameters without memory, shards between runs, fake tensors."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.torch_private import GROUPED, HOOKS, READ, FakeTensor, FakeTensorMode, no_subclasses, schema
from lightning_3d.module.undo import replaced_attributes
from lightning_3d.sandbox.trees import tensors_in

LARGE = 1 << 20
"""Bytes from which a result inside a step is fake."""


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_TENSOR: Any = Tensor
_CHANGES = (_TENSOR.requires_grad.__set__, _TENSOR.grad.__set__, Tensor.requires_grad_, Tensor.register_hook)
QUESTIONS = frozenset(
    {
        *map(_getter, ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf")),
        *map(_getter, ("is_meta", "is_cpu", "is_cuda", "is_sparse", "is_quantized", "itemsize", "nbytes", "_version")),
        *map(_getter, (*HOOKS, "is_nested", "is_mps", "is_xla")),
        Tensor.size, Tensor.stride, Tensor.storage_offset, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__,
        Tensor.element_size, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.__hash__,
        torch.is_floating_point, torch.is_complex, torch.numel, torch._has_compatible_shallow_copy_type, *_CHANGES,
    }
)  # fmt: skip
"""Functions that ask a tensor for anything but its values, or change anything else."""


class WithoutValues:
    """A base of classes of parameters. `use_values` runs before each function that may need values."""

    questions = QUESTIONS
    plain: ClassVar[type]
    """Class of the parameter once its values can be used."""

    @classmethod
    def hide(cls, parameter: Any) -> None:
        parameter.__class__ = cls

    def show(self) -> None:
        self.__class__ = self.plain  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in cls.questions:
            cls.use_values(func, args, kwargs)
        with no_subclasses():
            return func(*args, **kwargs)

    @classmethod
    def use_values(cls, func: Any, args: Any, kwargs: Any) -> None:
        """Give the parameters among the arguments their values, or raise."""
        raise NotImplementedError


class Replaced(WithoutValues):
    """Added to the class of a parameter in whose place this rank has a part of it: code may have kept the object."""

    questions = QUESTIONS - {_getter("grad"), *_CHANGES}

    @classmethod
    def use_values(cls, func: Any, args: Any, kwargs: Any) -> None:
        raise kept(next(each for each in tensors_in((args, kwargs)) if isinstance(each, cls)))

    def __deepcopy__(self, memo: Any) -> "Replaced":
        return self


def kept(parameter: Any) -> UnsupportedError:
    name = vars(parameter)["lightning_3d_name"]
    return UnsupportedError(
        f"code uses the object that {name} was before set-up, which it has kept in a closure or deep inside an"
        " object of its own. Ranks have parts of the weight in its place, and this object is trained no more."
        f" Take the weight from its module where it is used ({name}), or use zero_stage=0 with data ranks alone."
    )


REPLACED: Any = type("ReplacedParameter", (Replaced, nn.Parameter), {"__slots__": (), "plain": nn.Parameter})


class ShapesOnly(FakeTensorMode):
    """torch's mode, which refuses to read values. An initializer like `trunc_normal_` asks if any is out of bounds."""

    answers = True
    """False in a step whose costs are counted. Code that reads values is refused there, but for `values_of_small`."""
    within = False
    """True inside of an operation, which makes tensors for its result."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.unknown: dict[int, Tensor] = {}
        """Small tensors into which fake ones were written, by their memory."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.answers or self.within:
            return self._shapes(func, types, args, kwargs)
        tensors = tensors_in((args, kwargs))
        real = [each for each in tensors if not isinstance(each, FakeTensor) and not each.is_meta]
        if len(real) == len(tensors) and not any(each.untyped_storage().data_ptr() in self.unknown for each in real):
            return self.values_of_small(func, types, args, kwargs or {})
        if schema(func).is_mutable:
            self.unknown |= {each.untyped_storage().data_ptr(): each for each in real}
        return self._shapes(func, types, args, kwargs)

    def values_of_small(
        self, func: Any, types: Any, args: Any, kwargs: Any, fake: Callable[[Any], Any] = lambda value: value
    ) -> Any:
        """The result of `func` without fake arguments, as of positions and masks: from `fake` ones if `LARGE`."""
        meta = "meta" in str(kwargs.get("device", "")) or any(tensor.is_meta for tensor in tensors_in((args, kwargs)))
        if not meta and not func.is_view and not schema(func).is_mutable:
            try:
                guess = self._shapes(func, types, fake(args), fake(kwargs))
            except Exception:  # its shape depends on values (`nonzero`), and real tensors have them
                return func(*args, **kwargs)
            made = tensors_in(guess)
            large = sum(tensor.numel() * tensor.element_size() for tensor in made) >= LARGE
            if large or any(tensor.device.type != "cpu" for tensor in made):
                return guess
        return func(*args, **kwargs)

    def _shapes(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self.answers and func is READ:
            return value_of(args[0])
        if func is GROUPED.default and args[0].dtype is not torch.bfloat16:
            return _grouped(*args[:2], *(kwargs or {}).values(), *args[2:])  # torch's rule for shapes takes this alone
        with replaced_attributes(self, within=True):
            return super().dispatch(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShapesOnly":
        """This mode: a copied fake parameter of another mode is taken for a real one, and its views for new memory."""
        return self


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor, *_: Any) -> Tensor:
    """A tensor like the products of experts, or like the gradients of their weights, where both have two dimensions."""
    size = weights.shape[-1]
    return rows.new_empty((len(rows), size) if weights.ndim == 3 else (len(ends), len(rows), size))


def value_of(tensor: Tensor) -> Any:
    """The value of a fake tensor: False for a condition, else 1."""
    return False if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1
