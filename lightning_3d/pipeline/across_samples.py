"""A test for values of several samples that other samples meet, from the operations of two runs of a step.

Numbers show only what the first batch has. A scale for samples without data, or a count of tokens that are not padding,
may change nothing there. Such a value comes from samples, and has the same shape and another size for fewer of them.

Labels that cross entropy leaves out are seen in later batches too: its mean is over the others. Where microbatches
leave out unequally many, their mean is not that of the batch.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from lightning_3d.errors import UnsupportedError, module_of
from lightning_3d.pipeline.microbatch import Path
from lightning_3d.sandbox.fingerprint import Print, differ, fingerprint
from lightning_3d.sandbox.interceptor import ASKS, Call, Rule
from lightning_3d.sandbox.trees import leaves, tensors_in, values_at

_MOST, _SMALL = 4096, 2**16
"""Operations that are noted, and elements of a value that is compared."""
_BENT = (
    "clamp", "clamp_min", "clamp_max", "clip", "minimum", "maximum", "fmin", "fmax", "min", "max", "abs", "relu",
    "where", "hardtanh", "threshold",
)  # fmt: skip
"""Of a loss of several samples they may be the loss itself in the first batch: a cap, a floor (free bits)."""
_ENDS = ("detach", "data")
"""Of a gradient."""
_OF_SHAPES_ONLY = ("new_", "empty", "zeros", "ones", "full")
_SUMS = ("add", "sub", "rsub", "radd", "iadd", "isub", "cat", "stack")
"""A term of a loss may be a mean over all samples."""
_SELECTIONS = ("nonzero", "argwhere", "masked_select", "nanmean")
"""Values decide how many of them are taken."""
_RANKED = ("topk", "sort", "kthvalue", "quantile", "median", "nanmedian", "nanquantile")
"""Of a row of losses, values decide which of them are taken."""


class Operation(NamedTuple):
    """A tensor that an operation between blocks returned."""

    name: str
    place: str
    """File and line of the call."""
    call: int
    """The number of blocks that were called before."""
    inputs: tuple[int | Path, ...]
    """Indices of operations, and places in the batch."""
    shape: tuple[int, ...]
    grad: bool
    """It may have a gradient in training."""
    prints: list[Print]
    """Of a small tensor."""


@dataclass
class Operations:
    batch: dict[Path, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the tensors of the batch."""
    found: list[Operation] = field(default_factory=list)
    targets: list[tuple[Path, int]] = field(default_factory=list)
    """For each mean cross entropy: the place in the batch that its labels come from, and the one that it leaves out."""
    read: list[int] = field(default_factory=list)
    """Operations whose results code reads in Python: counts, of values of the batch alone, that may divide a loss."""
    decided: list[tuple[str, int | None, float, str]] = field(default_factory=list)
    """Places at which code, also of blocks, compares one number, with the number of blocks called before, the number,
    and the count that it may equal. Not of values of the batch alone, which are in `read`."""
    chosen: list[int] = field(default_factory=list)
    """Operations that values of the batch give a weight: a mean cross entropy that leaves out labels, whose labels
    others have changed or whose classes have weights, and a choice by a mask."""


class NoteOperations(Rule):
    """Note the operations of a step. `called` returns the number of blocks that were called, None inside of one."""

    def __init__(self, batch: Any, called: Callable[[], int | None], held: Iterable[Tensor] = ()) -> None:
        self.called = called
        self._known: dict[int, tuple[ref[Tensor], int | Path | None]] = {}
        """None for those that the module has `held`, and that code makes of nothing: others are of blocks."""
        self._sources: list[frozenset[Path]] = []
        self._pure = set[int | Path]()
        """Operations on values of the batch alone."""
        self._changed = set[int | Path]()
        """Those in which several tensors met, and what comes from these."""
        self._selected = set[int | Path]()
        """Those whose values decide how many they are, and what comes from these."""
        self._batch = {path: leaf for path, leaf in values_at(batch) if isinstance(leaf, Tensor)}
        self.noted = Operations({path: tuple(leaf.shape) for path, leaf in self._batch.items()})
        for path, leaf in (*((None, each) for each in held), *self._batch.items()):
            self._know(leaf, path)

    def before(self, call: Call) -> Call:
        if call.name == "register_hook" and not call.args[0].requires_grad:  # these runs train few parameters
            return call._replace(func=lambda *_: RemovableHandle(OrderedDict()))
        return call

    def after(self, call: Call, result: Any) -> None:
        number, noted = self.called(), self.noted
        first = call.args[0] if call.args else None
        compares = call.asks == "comparison" and isinstance(first, Tensor) and not first.dim()
        compares = compares and not module_of(call.caller).startswith("torchmetrics.")
        if compares and (number is None or self._index(first) not in self._pure):
            counts = call.name in ("eq", "__eq__") and not first.is_floating_point()  # type: ignore[union-attr]
            length = str(call.args[1:]) if counts else ""
            noted.decided.append((call.place, number, float(first.detach()), length))  # type: ignore[union-attr]
        if number is None or module_of(call.caller).startswith("lightning_3d."):
            return
        tensors = tensors_in(result)
        if not tensors and call.args and (known := self._index(call.args[0])) is not None:
            branch = call.asks == "truth" and isinstance(known, int) and _compares(noted.found[known])
            if (branch or call.asks == "number") and known in self._pure:
                noted.read.append(known)  # type: ignore[arg-type]
            elif call.name == "__setitem__":
                self._changed.add(known)
        if not tensors or len(noted.found) > _MOST:
            return
        of_shapes = call.name.startswith(_OF_SHAPES_ONLY)
        for leaf in () if of_shapes else call.tensors():
            if id(leaf) not in self._known or self._known[id(leaf)][0]() is not leaf:
                self._note(leaf, Operation("", call.place, number, (), tuple(leaf.shape), _may_train(leaf), []))
        inputs = tuple(dict.fromkeys(at for leaf in call.tensors() if (at := self._index(leaf)) is not None))
        if of_shapes or not inputs:
            for tensor in tensors:
                self._know(tensor, None)
            return
        sources = frozenset().union(*(self._sources_of(at) for at in inputs))
        if call.func in (F.cross_entropy, F.nll_loss) and _argument(call, 6, "reduction", "mean") == "mean":
            target = _argument(call, 1, "target", None)
            at = self._index(target)
            if at is not None and self._sources_of(at) and not target.is_floating_point():
                (of, *_), label = self._sources_of(at), _argument(call, 4, "ignore_index", -100)
                weighs = _argument(call, 2, "weight", None) is not None or (self._batch[of] == label).any()
                if at in self._changed or (isinstance(at, int) and self._renamed(noted.found[at], target, of, label)):
                    noted.chosen.append(at if isinstance(at, int) else len(noted.found))
                elif weighs:
                    noted.chosen.append(len(noted.found))
                else:
                    noted.targets.append((of, label))
        given = {id(leaf) for leaf in call.tensors()}
        pure = len(given) == len(inputs) and all(isinstance(at, tuple) or at in self._pure for at in inputs)
        selected = _selects(call) or not self._selected.isdisjoint(inputs)
        if pure and call.name.startswith("unique"):  # code reads how many there are by its length
            noted.read.append(len(noted.found))
        changed = len(given) > 1 or not self._changed.isdisjoint(inputs)
        trained = [at for at in inputs if isinstance(at, int) and noted.found[at].grad and call.name not in _ENDS]
        for this, tensor in enumerate(tensors, len(noted.found)):
            for kept, those in ((pure, self._pure), (changed, self._changed), (selected, self._selected)):
                those.update([this] if kept else ())
            noted.chosen += [this] if selected and tensor.requires_grad else []
            shape, prints = tuple(tensor.shape), fingerprint(tensor) if tensor.numel() <= _SMALL else []
            grad = tensor.requires_grad or (bool(trained) and _may_train(tensor))
            made = Operation(call.name.strip("_"), call.place, number, inputs, shape, grad, prints)
            self._note(tensor, made, sources)

    def _renamed(self, made: Operation, target: Tensor, of: Path, label: int) -> bool:
        """True where labels are other numbers than in the batch, which then cannot be asked for the one left out."""
        known = torch.cat([self._batch[of].flatten().to(target), target.new_tensor([label])])
        return made.name != "argmax" and not bool(torch.isin(target, known).all())

    def _note(self, tensor: Tensor, made: Operation, sources: frozenset[Path] = frozenset()) -> None:
        self._know(tensor, len(self.noted.found))
        self.noted.found.append(made)
        self._sources.append(sources)

    def _know(self, tensor: Tensor, index: int | Path | None) -> None:
        self._known[id(tensor)] = ref(tensor), index

    def _index(self, tensor: Any) -> int | Path | None:
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _sources_of(self, index: int | Path) -> frozenset[Path]:
        return self._sources[index] if isinstance(index, int) else frozenset((index,))


def _may_train(tensor: Tensor) -> bool:
    """True for what may have a gradient in training. These runs train one block."""
    return tensor.requires_grad or (tensor.is_floating_point() and torch.is_grad_enabled())


def _compares(operation: Operation) -> bool:
    """True for a comparison, which in the first batch may say the same of all samples and of some."""
    return ASKS.get(operation.name) == "comparison"


def _selects(call: Call) -> bool:
    """True where values decide the length of the result, or which losses of a row are in it."""
    masks = leaves(call.args[1:]) if call.name == "__getitem__" else ()
    alone = call.name == "where" and len(call.args) + len(call.kwargs) == 1
    ranked = call.name in _RANKED and isinstance(call.args[0], Tensor) and call.args[0].dim() == 1
    masked = any(getattr(each, "dtype", None) == torch.bool for each in masks)
    return alone or ranked or masked or call.name in _SELECTIONS


def _argument(call: Call, position: int, name: str, default: Any) -> Any:
    return call.args[position] if len(call.args) > position else call.kwargs.get(name, default)


class Meetings(NamedTuple):
    """Operations in which samples meet a value of several samples; None where there is none."""

    before: Operation | None = None
    """Ahead of the last block."""
    weight: Operation | None = None
    """Behind it: a value that has no gradient weighs one that has."""
    mixed: Operation | None = None
    """Ahead of it: a value that the first batch shows to differ."""


def find_meetings(full: Operations, part: Operations, calls: int) -> Meetings:
    """Compare the operations on the full batch with those on some of its samples."""
    kinds: list[str] = []
    """Of each operation: it has samples, is a value of several samples, or neither."""

    def kind(at: int | Path) -> str:
        if isinstance(at, int):
            return kinds[at]
        return "samples" if full.batch[at] != part.batch[at] else ""

    before = weight = mixed = None
    weights = set[int | Path]()
    """Values of samples that such a value scales, and what comes from these."""
    differing = set[int | Path]()
    """Values that the first batch shows to differ: where none does (a count of 0), what comes from them may, later."""
    for one, other in zip(full.found, part.found, strict=False):
        if (one.name, one.inputs, one.call) != (other.name, other.inputs, other.call):
            break  # the step went another way
        of = [kind(at) for at in one.inputs]
        samples = one.shape != other.shape
        reduced = "samples" in of and one.name != "getitem"  # of the first batch maybe 1.0, whatever the samples
        shown = one.name not in _BENT and any(at in differing for at in one.inputs)
        other_value = _compares(one) or not one.prints or differ(one.prints, other.prints)
        value = reduced or (any(of) and (other_value or not shown))
        if value and (not one.prints or differ(one.prints, other.prints)):
            differing.add(len(kinds))
        kinds.append("samples" if samples else "value" if value else "")
        values = [at for at, each in zip(one.inputs, of, strict=True) if each == "value"]
        if samples and values and one.call < calls:
            before = before or one
            if any(isinstance(at, int) and at in differing and full.found[at].prints for at in values):
                mixed = mixed or one
        plain = [at for at in values if isinstance(at, int) and not full.found[at].grad]
        scaled = plain and len(plain) < sum(map(bool, of)) and one.name not in _SUMS
        if scaled or not weights.isdisjoint(one.inputs):
            if not one.grad:
                weights.add(len(kinds) - 1)
            elif one.call == calls:
                weight = weight or one
        bends = one.name in _BENT and one.grad and any(isinstance(at, int) and full.found[at].grad for at in values)
        if bends and not samples and one.call == calls:
            weight = weight or one
    counts = [at for at in full.read if at < len(kinds) and kinds[at] == "value"]
    others = [full.found[at] for at in (*counts, *full.chosen)]
    return Meetings(before, weight or next(iter(others), None), mixed)


@dataclass
class LeftOut:
    """Refuses a batch whose microbatches leave out unequally many labels."""

    targets: Sequence[tuple[Path, int]] = ()
    """The place in a batch that has the labels of a cross entropy, and the label that it leaves out."""
    _late: list[tuple[Any, Tensor]] = field(default_factory=list)

    def check(self, microbatches: Sequence[Any], sizes: Sequence[int]) -> None:
        """Raise for a batch on the CPU, and one step late for a batch on another device, which is not waited for."""
        while self._late:
            event, uneven = self._late.pop()
            event.synchronize()
            _refuse(uneven)
        for path, label in self.targets if len(sizes) > 1 else ():
            labels: list[Any] = [dict(values_at(batch)).get(path) for batch in microbatches]
            if all(isinstance(each, Tensor) for each in labels):
                counts = [(each == label).sum() for each in labels]
                shares = torch.stack([count * sizes[0] for count in counts])
                uneven = (shares != torch.stack([counts[0] * size for size in sizes])).any()
                if uneven.is_cpu:
                    _refuse(uneven)
                else:
                    late, event = torch.empty((), dtype=torch.bool, pin_memory=True), torch.Event(uneven.device)
                    late.copy_(uneven, non_blocking=True)
                    event.record()
                    self._late.append((event, late))


def _refuse(uneven: Tensor) -> None:
    if uneven:
        raise UnsupportedError(
            "cross_entropy leaves out some labels of this batch (ignore_index), and not equally many of each"
            " microbatch. Its mean is over the other labels, so the mean over microbatches would be another loss than"
            " on one device. The first batch had no such labels, so the loss was taken for a mean over samples."
            " loss_scope='batch' computes it on the full batch."
        )
