"""A GPT whose blocks have a mixture of experts that its author wrote: a router, a list of MLPs, a loop.

One device:             python examples/mixture.py
Experts on two ranks:   python examples/mixture.py --strategy 3d --experts 2 --devices 2

With two ranks each has four of the eight experts, and tokens travel to their experts and back.
"""

from typing import Any

import torch
from common import run
from gpt_from_scratch import StandardLibrary
from nanogpt import MLP, GPTConfig, NanoGPT
from torch import Tensor, nn


class Mixture(nn.Module):
    """Each token goes through two of the experts, and their results are weighted."""

    def __init__(self, config: GPTConfig, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(config.n_embd, experts, bias=False)
        self.experts = nn.ModuleList([MLP(config) for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.size(-1))
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                result = result.index_add(0, token, expert(tokens[token]) * weights[token, place, None])
        return result.view_as(x)


class MixtureGPT(NanoGPT):
    def __init__(self, width: int = 64, layers: int = 2, experts: int = 8, **others: Any) -> None:
        super().__init__(width=width, layers=layers, **others)
        for block in self.transformer["h"]:
            block.mlp = Mixture(self.config, experts)


if __name__ == "__main__":
    run(MixtureGPT, StandardLibrary, __doc__)
