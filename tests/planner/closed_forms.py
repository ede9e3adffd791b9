"""Published closed forms. Tests compare them with the numbers of papers, and the planner with them.

From Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021), and Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022). A multiply and an add count as two FLOPs.
Activations are bytes with 16-bit numbers and 1-byte dropout masks; the paper's MB is 2**20.
"""

from lightning_3d.optim.state_bytes import MOMENTS, StateBytes
from lightning_3d.pipeline.stage_costs import EQUAL, bubble_time
from lightning_3d.tools.planner.advice import A100_PEAK, RULE_SHARE

DAY = 86400.0


def gpt_parameters(*, layers, hidden, vocabulary, sequence):
    """`12 l h^2 (1 + 13/(12h) + (V+s)/(12lh))`: blocks with biases and norms, token and position embeddings."""
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocabulary + sequence) / (12 * layers * hidden))


def gpt_flops(*, batch, sequence, layers, hidden, vocabulary, recompute="none"):
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


def utilisation(flops, *, seconds, devices, peak):
    """Share of `devices` x `peak` FLOP/s used by an iteration of `flops` in `seconds`: MFU of the model's FLOPs, HFU of
    the hardware's."""
    return flops / (seconds * devices * peak)


def iteration_seconds(flops, *, devices, sustained):
    """Seconds of an iteration of `flops` where every device sustains `sustained` FLOP/s."""
    return flops / (devices * sustained)


def rule_of_thumb_constant():
    """The origin of 13.3: 6 FLOPs per parameter and token, at 40% of an A100's 312 TFLOP/s, in hours per 1e18."""
    return 6e18 / (RULE_SHARE * A100_PEAK) / 3600


def gpt_layer_activations(*, sequence, batch, hidden, heads, tensor=1, sequence_parallel=False, recompute="none"):
    """Bytes saved for backward by one layer, for a microbatch of `batch` sequences, on one of `tensor` ranks."""
    unit = sequence * batch * hidden
    if recompute == "full":
        return 2 * unit
    scores = 0 if recompute == "selective" else 5 * heads * sequence**2 * batch
    outside = 10 * unit / tensor if sequence_parallel else 10 * unit
    return outside + (24 * unit + scores) / tensor


def bubble_over_ideal(schedule, *, stages, microbatches, chunks=1):
    """Idle time over useful time: `(p-1)/m` for GPipe and 1F1B, `(p-1)/(vm)` interleaved."""
    return bubble_time(schedule, stages=stages, chunks=chunks) / (microbatches * EQUAL.total)


def zero_bubble_time(level, *, stages, times=EQUAL):
    """Idle time of the hand-written zero-bubble schedules: H1 `(p-1)(TF+TB-TW)`, H2 `(p-1)(TF+TB-2TW)`."""
    idle = times.forward + times.backward_input - level * times.backward_weight
    return (stages - 1) * max(0.0, idle)


def state_bytes(precision="16-mixed", optimizer="adam"):
    """Bytes per parameter as papers count them: 16 for mixed-precision Adam (2 + 2 + 12) and fp32 Adam (4 + 4 + 8).

    `number_bytes` has those of this strategy, which casts fp32 weights: 4 + 4 + 8.
    """
    moments = MOMENTS[optimizer]
    if precision == "32":
        return StateBytes(weights=4, gradients=4, optimizer=4 * moments)
    if precision.endswith("-mixed"):
        return StateBytes(weights=2, gradients=2, optimizer=4 + 4 * moments)
    return StateBytes(weights=2, gradients=2, optimizer=2 * moments)


def sharded_states(per_parameter, parameters, *, stage, ranks):
    """Bytes on one of `ranks` data-parallel ranks (Rajbhandari et al. 2020, whose GB is 1e9).

    Stage 1 shards the optimizer, 2 also gradients, 3 also weights.
    """
    weights, gradients, optimizer = (parameters / (ranks if stage >= least else 1) for least in (3, 2, 1))
    return per_parameter.times(weights, gradients, optimizer)


def largest_model(memory, *, stage, ranks):
    """Parameters whose states alone fill `memory` bytes on each of `ranks` ranks."""
    return memory / sharded_states(StateBytes(), 1, stage=stage, ranks=ranks).total


def idle(passes, *, joined=False):
    """Time that a rank idles: from its first pass to its last, or `joined`, from the step's begin to its end."""
    spans = []
    for rank in {done.rank for done in passes}:
        own = [done for done in passes if done.rank == rank]
        begin = 0.0 if joined else min(done.start for done in own)
        end = max(done.end for done in (passes if joined else own))
        spans.append(end - begin - sum(done.end - done.start for done in own))
    return max(spans)
