"""Norms over all the channels of a split region (of queries over every head, say): each rank gathers what they take.

What such a norm gives depends on every channel, so a gradient shows no division. To find one, the norm is replaced by
its own weight alone, which acts on each channel by itself. The candidate that this suggests runs the true norm, whole,
between a gathering and the taking of a part; the proof says whether that was all there was to it.
"""

import copy
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lightning_3d.tensor.plan import UnitPlan
from lightning_3d.tensor.regions import Region

if TYPE_CHECKING:
    from lightning_3d.tensor.search import Study


def find_mixers(known: "Study", region: Region) -> list[str]:
    """Modules in `region` with nothing but vectors as wide as a column product: they may mix its channels."""
    results = known.looks[0].trace.results
    widths = {t.shape[-1] for site in region.sources for t in results[known.flow.calls[site][0].module]}
    owners = dict.fromkeys(name.rpartition(".")[0] for name in region.inner)
    return [name for name in owners if name in known.called and _is_norm(known.modules[name], widths)]


def without_mixing(known: "Study", mixers: Collection[str]) -> "Study":
    """What is known of the block if `mixers` acted on each channel alone."""
    twin = copy.copy(known)
    make = known.make
    twin.make, twin.looks, twin.mixers = lambda seed: _act_alone(make(seed), mixers), [], tuple(mixers)
    first = twin.look(0)
    twin.flow, twin.parameters = first.flow, first.parameters
    return twin


def gather_around(plan: UnitPlan, mixers: Collection[str]) -> UnitPlan:
    """The candidate `plan`, in which `mixers` are split, with them computed whole on gathered channels instead."""
    mixes = {
        name: next(split for parameter, split in plan.splits.items() if parameter.rpartition(".")[0] == name)
        for name in mixers
        if any(parameter.rpartition(".")[0] == name for parameter in plan.splits)
    }
    own = [parameter for parameter in plan.splits if parameter.rpartition(".")[0] in mixes]
    splits = {parameter: split for parameter, split in plan.splits.items() if parameter not in own}
    return replace(plan, splits=splits, summed=(*plan.summed, *own), mixes=mixes)


def _is_norm(module: nn.Module, widths: Collection[int]) -> bool:
    vectors = list(module.parameters())
    return bool(vectors) and all(vector.dim() == 1 and vector.numel() in widths for vector in vectors)


def _act_alone(twin: nn.Module, mixers: Collection[str]) -> nn.Module:
    for name in mixers:
        twin.get_submodule(name).__dict__["forward"] = _scaling(list(twin.get_submodule(name).parameters()))
    return twin


def _scaling(vectors: list[nn.Parameter]) -> Callable[[Tensor], Tensor]:
    def scale(tensor: Tensor) -> Tensor:
        for vector in vectors:
            tensor = tensor * vector if tensor.shape[-1] == vector.numel() else tensor
        return tensor

    return scale
