"""Gradients that a rank lacks, because its data left some parameters out: an expert without tokens, a skipped branch.

FSDP2 sends the gradients that a rank has, so ranks with other ones would send messages of other lengths. A missing
gradient counts as zeros. One that no rank has is None afterwards, as on one device: optimizers skip that parameter.

At the end of a backward ranks exchange one message between their hosts: the parameters that they used, and the order of
their gathers and reductions. A rank with all gradients reads it one step late, and waits for nothing.
"""

from collections.abc import Sequence
from typing import Any

from torch import distributed as dist

from lightning_3d.errors import OTHER_BLOCKS, DivergenceError
from lightning_3d.ranks.talk import PendingMax
from lightning_3d.zero import fsdp_unit_private
from lightning_3d.zero.fsdp_seam import FullySharded


class MissingGradients:
    """Completes the gradients of `groups` of FSDP2, in the same order on every rank, with zeros.

    `hosts` are the ranks that average gradients, for messages of the main thread.
    """

    def __init__(self, groups: Sequence[Any], seam: FullySharded, hosts: dist.ProcessGroup) -> None:
        self.seam, self.hosts = seam, hosts
        self.places = {param: place for place, param in enumerate(p for group in groups for p in group.fsdp_params)}
        self.used = [1] * len(self.places)
        self.missing: dict[Any, dict[Any, bool]] = {}
        """For each group that was reduced in this backward the parameters without a gradient. True: nor before it."""
        self.last: PendingMax | None = None
        """The message of the last step, if this rank has not read it."""
        self.active = False
        """True in a backward of the strategy. One that the user's code calls by itself ends without `finish`."""
        for group in groups:
            fsdp_unit_private.complete(group, lambda: self.active, self._note)

    def _note(self, group: Any, missing: Sequence[Any]) -> None:
        """Keep the parameters of `group` that had no gradient in any of its reductions."""
        if group not in self.missing:
            self.missing[group] = {param: param.sharded_param.grad is None for param in missing}
        else:
            self.missing[group] = {p: new for p, new in self.missing[group].items() if p in missing}

    def finish(self) -> None:
        """Take the zeros from parameters that no rank has used. Collective, once gradients are reduced."""
        self.active = False
        missing = {param: new for some in self.missing.values() for param, new in some.items()}
        self.missing.clear()
        used = self.used
        if missing:
            used = [int(param not in missing) for param in self.places]
        order, self.seam.sequence = self.seam.sequence, 0
        message = PendingMax([order, -order, *used], self.hosts)
        self.read_last()
        if not missing:
            self.last = message
            return
        used = self._read(message)
        for param, new in missing.items():
            if new and not used[self.places[param]]:
                param.sharded_param.grad = None

    def read_last(self) -> None:
        """Compare with the message of the last step, where this rank has not read it."""
        if self.last is not None:
            last, self.last = self.last, None
            self._read(last)

    def _read(self, message: PendingMax) -> list[int]:
        order, negative, *used = message.wait()
        if order != -negative:
            raise DivergenceError(OTHER_BLOCKS)
        return used
