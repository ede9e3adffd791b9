"""What the fuzzer draws: a module, a layout and Trainer flags that fit each other."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

from lightning_3d.layout import SCHEDULES
from tests.fuzz.grammar import ACTIVATIONS, OPTIMIZERS, Spec

LAYOUTS = [
    (2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 1, 1), (1, 3, 1), (1, 1, 3),
    (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1), (1, 1, 4),
]  # fmt: skip
"""(data, tensor, pipeline), at most four ranks."""
V_SHAPED = tuple(name for name, facts in SCHEDULES.items() if facts.v_shaped)
INTERLEAVED = tuple(name for name, facts in SCHEDULES.items() if facts.stages_per_rank is None)


@dataclass(frozen=True)
class Case:
    """A training; its `repr` is Python."""

    spec: Spec = field(default_factory=Spec)
    strategy: dict = field(default_factory=dict)
    trainer: dict = field(default_factory=dict)
    attributes: dict = field(default_factory=dict)

    @property
    def world(self):
        axes = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
        sizes = [self.strategy.get(axis, 1) for axis in axes]
        return sizes[0] * sizes[1] * sizes[2]


flags = st.booleans()
rarely = st.sampled_from([False] * 4 + [True])


def _simple(heads, hidden):
    kinds = [
        st.tuples(st.just("linear"), flags),
        st.tuples(st.just("mlp"), hidden, st.sampled_from(sorted(ACTIVATIONS)), flags),
        st.tuples(st.just("gated"), hidden, flags),
        st.sampled_from([("layer_norm",), ("rms_norm",)]),
        st.tuples(st.just("act"), st.sampled_from(sorted(ACTIVATIONS))),
        st.tuples(st.just("scale"), flags),
    ]
    if heads is not None:
        styles = st.sampled_from(["fused", "dealt", "grouped", "separate", "written"])
        kinds.append(st.tuples(st.just("attention"), heads, styles))
        kinds.append(st.tuples(st.just("torch_attention"), heads))
    return st.one_of(kinds)


def _blocks(source):
    heads = None if source == "vector" else st.sampled_from([2, 4])
    simple = _simple(heads, st.sampled_from([6, 8, 12, 16, 32]))
    residual = st.lists(simple, min_size=1, max_size=3).map(lambda inner: ("residual", *inner))
    nested = st.tuples(residual, simple).map(lambda inner: ("residual", *inner))
    return st.one_of(simple, residual, residual, nested)


@st.composite
def specs(draw, stages):
    source = draw(st.sampled_from(["vector", "sequence", "tokens", "tokens"]))
    kind = _blocks(source)
    count = draw(st.integers(max(1, stages), stages + 3))
    alike = draw(flags)
    blocks = (draw(kind),) * count if alike else tuple(draw(st.lists(kind, min_size=count, max_size=count)))
    vocabulary = draw(st.sampled_from([7, 11, 16]))
    tie = draw(st.sampled_from(["none", "none", "table" if source == "tokens" else "none", "weight", "module"]))
    if tie == "module" and (count < 2 or len(set(blocks)) > 1):
        tie = "none"
    if tie == "weight" and (count < 2 or len(set(blocks)) > 1 or not _has_linear(blocks[0])):
        tie = "none"
    where = st.sampled_from([-1, -1, -1, 0, count // 2])
    head = st.tuples(st.sampled_from(["ce", "mse"]), st.sampled_from([2, 3, 8, 12]), where)
    heads = [draw(head) for _ in range(draw(st.sampled_from([1, 1, 2, 3])))]
    if tie == "table":
        heads[0] = ("ce", vocabulary, -1)
    return Spec(
        source=source,
        width=draw(st.sampled_from([8, 12, 16])),
        blocks=blocks,
        container=draw(st.sampled_from(["list", "sequential", "attributes"])),
        heads=tuple(heads),
        tie=tie,
        skip=draw(rarely),
        frozen=draw(rarely),
        recompute=draw(rarely),
        vocabulary=vocabulary,
    )


def _has_linear(block):
    """Whether the first linear layer of the block is a square one."""
    kinds = [part[0] for part in block[1:] if isinstance(part, tuple)] if block[0] == "residual" else [block[0]]
    return kinds[0] in ("linear", "mlp", "gated")


@st.composite
def cases(draw):
    data, tensor, pipeline = draw(st.sampled_from(LAYOUTS))
    strategy = {"data_parallel_size": data, "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    per_rank = 1
    if data > 1:
        strategy["zero_stage"] = draw(st.sampled_from([0, 1, 2, 3]))
        if data == 4 and strategy["zero_stage"]:
            strategy["zero_shard_size"] = draw(st.sampled_from([None, 2]))
        strategy["grad_sync"] = draw(st.sampled_from(["ring", "ring", "native"]))
    if tensor > 1:
        strategy["sequence_parallel"] = draw(rarely)
    if pipeline > 1:
        strategy["schedule"] = draw(st.sampled_from(["1f1b", "1f1b", "gpipe", *INTERLEAVED, *V_SHAPED]))
        strategy["num_microbatches"] = draw(st.sampled_from(["auto", 1, 2, 3, 4]))
        if strategy["schedule"] in INTERLEAVED:
            per_rank = strategy["stages_per_rank"] = draw(st.sampled_from([1, 2]))
        strategy["loss_scope"] = draw(st.sampled_from(["microbatch"] * 4 + ["batch"]))
        per_rank = 2 if strategy["schedule"] in V_SHAPED else per_rank
    rows = draw(st.integers(1, 6))
    full, rest = draw(st.integers(2, 4)), draw(st.integers(0, rows - 1))
    attributes = {
        "batch_size": data * rows,
        "samples": data * (full * rows + rest),
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "schedule": draw(st.sampled_from([None, None, "step", "epoch"])),
    }
    return Case(draw(specs(pipeline * per_rank)), strategy, draw(_trainers()), attributes)


@st.composite
def _trainers(draw):
    trainer = {
        "max_epochs": draw(st.sampled_from([1, 2])),
        "precision": draw(st.sampled_from(["64-true"] * 5 + ["32-true", "32-true", "bf16-mixed"])),
        "accumulate_grad_batches": draw(st.sampled_from([1, 1, 2, 3])),
    }
    clip = draw(st.sampled_from([None, None, ("norm", 0.3), ("value", 0.02)]))
    if clip:
        trainer |= {"gradient_clip_algorithm": clip[0], "gradient_clip_val": clip[1]}
    if draw(flags):
        trainer |= {"limit_val_batches": 2, "val_check_interval": draw(st.sampled_from([1, 2]))}
        trainer["num_sanity_val_steps"] = draw(st.sampled_from([0, 1]))
    return trainer
