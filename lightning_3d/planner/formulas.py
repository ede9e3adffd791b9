"""Published closed forms: parameters, FLOPs and activations of a GPT, days and money of a training, elements sent.

From Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021), and Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022). A multiply and an add count as two FLOPs.
Activations are bytes with 16-bit numbers and 1-byte dropout masks; the paper's MB is 2**20. Messages are counted in
elements per axis: multiply by bytes per element.
"""

from math import ceil

from lightning_3d.errors import PlannerError
from lightning_3d.layout import Recompute, Schedule, ZeroStage


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
    """Seconds of an iteration of `flops` where every device sustains `sustained` FLOP/s."""
    return flops / (devices * sustained)


DAY = 86400.0
YEAR = 365.25 * DAY
A100_PEAK, RULE_SHARE = 312e12, 0.40
"""FLOP/s of an A100 with 16-bit numbers, and the share of it that the rule of thumb takes to be reached."""


def training_seconds(
    *, tokens: float, parameters: float, devices: int, sustained: float, recompute: bool = False
) -> float:
    """`8TP/(nX)` with full recompute, `6TP/(nX)` without: a few percent below the exact FLOPs, which also count
    attention and the head."""
    if devices < 1:
        raise PlannerError(f"{devices} devices train nothing: give at least 1.")
    if sustained <= 0:
        raise PlannerError(f"a rate of {sustained:g} FLOP/s must be above 0.")
    return (8 if recompute else 6) * tokens * parameters / (devices * sustained)


def devices_for(seconds: float, *, device_seconds: float) -> int:
    """Fewest devices that finish `device_seconds` of work within `seconds`."""
    if seconds <= 0:
        raise PlannerError(f"a deadline of {seconds:g} seconds is not a positive time.")
    return ceil(device_seconds / seconds - 1e-9)


def rule_of_thumb_hours(*, billion_tokens: float, billion_parameters: float, epochs: float = 1) -> float:
    """GPU-hours on A100 80 GB as people quote them: 13.3 x billions of tokens x epochs x billions of parameters."""
    return 13.3 * billion_tokens * epochs * billion_parameters


def rule_of_thumb_constant(*, peak: float = A100_PEAK, share: float = RULE_SHARE) -> float:
    """The origin of 13.3: 6 FLOPs per parameter and token, at 40% of an A100's 312 TFLOP/s, in hours per 1e18."""
    return 6e18 / (share * peak) / 3600


def inference_devices(*, output_tokens: float, tokens_per_second: float, requests_per_minute: float) -> float:
    """Devices that answer `requests_per_minute` of `output_tokens` each, where one makes `tokens_per_second`."""
    if tokens_per_second <= 0:
        raise PlannerError(f"tokens per second of one device must be positive, not {tokens_per_second:g}.")
    return output_tokens / tokens_per_second * requests_per_minute / 60


def rent(*, devices: int, dollars_per_hour: float, hours: float) -> float:
    """Dollars for `devices` at a price per device and hour."""
    return devices * dollars_per_hour * hours


def energy_kwh(*, devices: int, watts: float, hours: float, overhead: float = 1.2) -> float:
    """Kilowatt-hours at the wall: `overhead` is what cooling and power supply add (PUE)."""
    return devices * watts * hours * overhead / 1000


def gpt_layer_activations(
    *,
    sequence: int,
    batch: int,
    hidden: int,
    heads: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> float:
    """Bytes saved for backward by one layer, for a microbatch of `batch` sequences, on one of `tensor` ranks."""
    unit = sequence * batch * hidden
    if recompute == "full":
        return 2 * unit
    scores = 0 if recompute == "selective" else 5 * heads * sequence**2 * batch
    outside = 10 * unit / tensor if sequence_parallel else 10 * unit
    return outside + (24 * unit + scores) / tensor


def gpt_first_stage_activations(
    per_layer: float, *, layers: int, schedule: Schedule, stages: int, chunks: int = 1, microbatches: int
) -> float:
    """Bytes saved on the first pipeline rank, which has `layers / stages` layers and the most microbatches."""
    held = microbatches_held(schedule, stages=stages, chunks=chunks, microbatches=microbatches)
    return per_layer * layers / stages * held


def microbatches_held(schedule: Schedule, *, stages: int, chunks: int = 1, microbatches: int) -> float:
    """Most microbatches whose activations the first of `stages` pipeline ranks has at once, in whole ranks' worth.

    1F1B keeps `p`, as do the split schedules, on every rank; interleaving keeps `p (1 + (p-1)/(pv))`; DualPipeV one
    virtual stage more than `p`; schedules that run every forward first keep all `m`.
    """
    p, v, m = stages, chunks, microbatches
    if schedule in ("gpipe", "loopedbfs"):
        return m
    if schedule == "interleaved_1f1b" and v > 1:
        return min(m, p * (1 + (p - 1) / (p * v)))
    if schedule == "dualpipev":
        return min(m, p + 0.5 if p > 1 else 1)
    assert schedule in ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"), schedule
    return min(m, p)


def ring_all_reduce(elements: float, ranks: int) -> float:
    """Elements that each of `ranks` ranks sends to all-reduce a buffer on a ring: `2(N-1)/N` of it."""
    return 2 * ring_reduce_scatter(elements, ranks)


def ring_reduce_scatter(elements: float, ranks: int) -> float:
    """Elements that each rank sends to reduce-scatter a buffer on a ring: `(N-1)/N` of it; an all-gather the same."""
    return elements * (ranks - 1) / ranks


def zero_elements(parameters: float, stage: ZeroStage) -> float:
    """Elements per rank and step as the ZeRO paper counts them: `2P` for stages 0 to 2, `3P` for stage 3."""
    return parameters * (3 if stage == 3 else 2)


def data_elements(parameters: float, *, stage: ZeroStage, ranks: int) -> float:
    """Elements each rank sends on rings per step: `zero_elements` times `(N-1)/N`, so none for one rank."""
    return ring_reduce_scatter(zero_elements(parameters, stage), ranks)


def pipeline_elements(*, batch: int, sequence: int, hidden: int) -> int:
    """Elements over one stage boundary, in one direction, for one microbatch: `bsh`."""
    return batch * sequence * hidden


def tensor_elements(*, batch: int, sequence: int, hidden: int, tensor: int) -> float:
    """Elements each tensor rank sends for one layer and one microbatch, forward and backward: `8bsh(t-1)/t`.

    Two all-reduces forward and two backward; with sequence parallelism each is a reduce-scatter and an all-gather,
    which send as much.
    """
    return 4 * ring_all_reduce(batch * sequence * hidden, tensor)


def powersgd_elements(rows: int, columns: int, rank: int) -> int:
    """Elements that PowerSGD sends in place of a `rows` x `columns` gradient: `(m+n) r`."""
    return (rows + columns) * rank
