"""Memory that activations take: per layer of a GPT, and how many microbatches' worth a pipeline stage holds.

From Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022). Bytes, with 16-bit
activations and 1-byte dropout masks; the paper's MB is 2**20.
"""

from lightning_3d.layout import Recompute, Schedule


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
    """Bytes kept for backward by one layer, for a microbatch of `batch` sequences, on one of `tensor` ranks."""
    unit = sequence * batch * hidden
    if recompute == "full":
        return 2 * unit
    scores = 0 if recompute == "selective" else 5 * heads * sequence**2 * batch
    outside = 10 * unit / tensor if sequence_parallel else 10 * unit
    return outside + (24 * unit + scores) / tensor


def gpt_first_stage_activations(
    per_layer: float, *, layers: int, schedule: Schedule, stages: int, chunks: int = 1, microbatches: int
) -> float:
    """Bytes kept on the first pipeline rank, which holds `layers / stages` layers and the most microbatches."""
    held = microbatches_held(schedule, stages=stages, chunks=chunks, microbatches=microbatches)
    return per_layer * layers / stages * held


def microbatches_held(schedule: Schedule, *, stages: int, chunks: int = 1, microbatches: int) -> float:
    """Most microbatches whose activations the first of `stages` pipeline ranks keeps at once, in whole ranks' worth.

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
    return min(m, p)
