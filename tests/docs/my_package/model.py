import torch

from tests.zoo.language import GPT


class LitGPT(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 8, dtype=torch.long)
