"""The names of `tests/zoo` under their former address, until every branch imports them from there."""

from tests.zoo import MODULES
from tests.zoo.base import Base, Batches
from tests.zoo.language import GPT, Block, Encoder, Llama, UntiedGPT
from tests.zoo.vectors import MLP
from tests.zoo.vision import ConvNet

__all__ = ["GPT", "MLP", "MODULES", "Base", "Batches", "Block", "ConvNet", "Encoder", "Llama", "UntiedGPT"]
