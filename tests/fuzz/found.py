"""Cases that the fuzzer has found, by what was wrong."""

from dataclasses import replace

from tests.fuzz.draw import Case
from tests.fuzz.grammar import Spec

FLAGS = {"max_epochs": 1, "precision": "64-true", "accumulate_grad_batches": 1}
ATTRIBUTES = {"batch_size": 4, "samples": 12, "optimizer": "sgd", "schedule": None}


def _pipeline(spec, stages, **strategy):
    return Case(spec, {"pipeline_parallel_size": stages, **strategy}, FLAGS, ATTRIBUTES)


LINEARS = (("linear", True),) * 4
HEADS = (("mse", 8, -1), ("ce", 12, -1), ("ce", 2, -1))
INSIDE = (("residual", ("linear", False), ("mlp", 12, "tanh", True)),)

FOUND = {
    "of several heads only the last one's loss was on the whole batch": _pipeline(
        Spec(blocks=LINEARS, heads=HEADS), 2, loss_scope="batch", num_microbatches=2
    ),
    "blocks that no loss depends on got gradients of zeros, and so weight decay": _pipeline(
        Spec(blocks=LINEARS, heads=(("mse", 3, 0),)), 2
    ),
    "blocks that no loss depends on, sharded": replace(
        _pipeline(Spec(blocks=LINEARS, heads=(("mse", 3, 0),)), 2, zero_stage=3, data_parallel_size=2),
        trainer=FLAGS | {"accumulate_grad_batches": 2},
    ),
    "a block that stands at two places was a unit at one and opened at the other": _pipeline(
        Spec(blocks=(("mlp", 8, "relu", False),) * 5, container="attributes", tie="module"), 3
    ),
    "blocks that are found by getattr were placed behind the heads": _pipeline(
        Spec(blocks=LINEARS, container="attributes"), 2
    ),
    "the gradient of a table of 11 rows on two ranks could not be flattened to be compared": Case(
        Spec(source="tokens", width=16, blocks=(("linear", True),) * 6, heads=(("ce", 11, -1), ("ce", 12, 0)),
             tie="table", recompute=True, vocabulary=11),
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "schedule": "zbv_zero_bubble"},
        FLAGS | {"gradient_clip_algorithm": "norm", "gradient_clip_val": 0.3},
        ATTRIBUTES | {"samples": 13, "optimizer": "adamw"},
    ),
    "layers of a Sequential that were called one by one were divided as if it were called itself": Case(
        Spec(width=12, blocks=LINEARS, container="sequential", heads=(("mse", 8, 0), ("mse", 3, -1))),
        {"tensor_parallel_size": 2},
        FLAGS,
        ATTRIBUTES,
    ),
    "parts of a sequence left a block on one stage and were whole on the others": Case(
        Spec(source="tokens", width=8, blocks=(("mlp", 8, "relu", True), ("mlp", 6, "tanh", False)), skip=True,
             container="attributes", heads=(("ce", 8, -1),), vocabulary=16),
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "sequence_parallel": True, "num_microbatches": 2},
        FLAGS,
        ATTRIBUTES,
    ),
    "parts of a sequence were handed to a sharded block as if FSDP2 had seen them before": Case(
        Spec(source="sequence", width=12, blocks=(("gated", 12, True),) * 4, container="attributes", tie="weight",
             heads=(("mse", 12, -1),)),
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 1, "sequence_parallel": True},
        FLAGS,
        ATTRIBUTES,
    ),
    "a module that stands at two places was cut into shards, and these again": Case(
        Spec(blocks=(("mlp", 8, "tanh", False),) * 3, container="list", tie="module"),
        {"tensor_parallel_size": 2},
        FLAGS,
        ATTRIBUTES,
    ),
}  # fmt: skip
"""These train."""

REFUSED = {
    "a cut inside a checkpointed region stopped one rank in its backward": (
        _pipeline(Spec(blocks=INSIDE, recompute=True, container="attributes"), 4),
        "inside one torch.utils.checkpoint",
    ),
}
"""These are refused, on every rank, with what is said."""
