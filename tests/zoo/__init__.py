from tests.zoo.language import GPT, Encoder, Llama, UntiedGPT
from tests.zoo.plain import MLP, ConvNet

MODULES = {kind.__name__: kind for kind in (MLP, Encoder, GPT, UntiedGPT, ConvNet, Llama)}
"""The modules that are trained in every layout."""
