"""Parameters and FLOPs of a GPT, as published closed forms.

From Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021), and Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022). A multiply and an add count as two.
"""

from lightning_3d.layout import Recompute


def gpt_parameters(*, layers: int, hidden: int, vocabulary: int, sequence: int) -> float:
    """`12 l h^2 (1 + 13/(12h) + (V+s)/(12lh))`: blocks with biases and norms, token and position embeddings."""
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocabulary + sequence) / (12 * layers * hidden))


def gpt_flops(
    *, batch: int, sequence: int, layers: int, hidden: int, vocabulary: int, recompute: Recompute = "none"
) -> float:
    """FLOPs that the hardware does in one iteration over `batch` sequences, all devices together.

    With `recompute="none"` these are the model's own FLOPs, the ones that MFU counts.
    """
    head = vocabulary / (layers * hidden)
    attention = sequence / hidden
    per_block = batch * sequence * layers * hidden**2
    if recompute == "full":
        return 96 * per_block * (1 + attention / 6 + head / 16)
    if recompute == "selective":
        return 72 * per_block * (1 + attention / 3 + head / 12)
    return 72 * per_block * (1 + attention / 6 + head / 12)


def utilisation(flops: float, *, seconds: float, devices: int, peak: float) -> float:
    """Share of `devices` x `peak` FLOP/s used by an iteration of `flops` in `seconds`: MFU of the model's FLOPs, HFU of
    the hardware's."""
    return flops / (seconds * devices * peak)


def iteration_seconds(flops: float, *, devices: int, sustained: float) -> float:
    """How long an iteration of `flops` takes where every device sustains `sustained` FLOP/s."""
    return flops / (devices * sustained)
