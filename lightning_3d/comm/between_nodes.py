"""`BetweenNodes`: gradients that are added exactly inside each node, and encoded where they leave it.

Links inside a node are fast, and an encoding costs more time there than it saves. Each rank encodes the part of the
node's sum that it sends, which is 1 / (ranks per node) of the gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_3d.comm.codecs import Codec
from lightning_3d.comm.compression import Elementwise, fp32_rows
from lightning_3d.comm.hierarchical import Hierarchical


class BetweenNodes(Elementwise):
    """The codec's messages go between ranks in the same place of each node, the exact ones inside the node."""

    def __init__(self, collectives: Hierarchical, codec: Codec, *, error_feedback: bool = True) -> None:
        super().__init__(collectives.between, codec, error_feedback=error_feedback)
        self.inside = collectives.inside

    def all_reduce(self, gradients: Sequence[Tensor], keys: Sequence[str]) -> None:
        parts = torch.cat([fp32_rows(gradient, self.inside.size) for gradient in gradients], dim=1)
        widths = [-(-gradient.numel() // self.inside.size) for gradient in gradients]
        own = self._sum_inside(parts)
        super().all_reduce(own.split(widths), keys)
        self.inside.all_gather(parts.view(-1), own)
        for gradient, average in zip(gradients, parts.split(widths, dim=1), strict=True):
            gradient.copy_(average.reshape(-1)[: gradient.numel()].view(gradient.shape))

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[str], widths: Sequence[int]
    ) -> None:
        nodes, size = self.collectives.size, self.inside.size
        # rank (node, place) is to get shard node * size + place: each place first sums its shards of every node
        places = [piece.view(nodes, size, -1).transpose(0, 1).reshape(size, -1).float() for piece in inputs]
        own = self._sum_inside(torch.cat(places, dim=1))
        super().reduce_scatter(outputs, own.split([nodes * output.numel() for output in outputs]), keys, widths)

    def _sum_inside(self, parts: Tensor) -> Tensor:
        """This rank's row of the average of `parts` in its node. The other rows are lost."""
        own = parts[self.inside.rank]
        self.inside.reduce_scatter(own, parts.view(-1), average=True)
        return own
