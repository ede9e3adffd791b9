"""One account of memory and messages: the plan, the dry run and real ranks have the same states and bytes."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_3d import Strategy3D
from lightning_3d.optim.state_bytes import MOMENTS
from lightning_3d.parallel.state_counts import expected_states, with_states
from lightning_3d.pipeline.microbatch import TENSORS, auto_microbatches
from lightning_3d.pipeline.split import plan_split
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tools.auto_layout import run_ahead
from lightning_3d.tools.planner.catalogue import Catalogue
from lightning_3d.tools.planner.choose import among_data
from lightning_3d.tools.planner.hardware import Cluster
from lightning_3d.tools.planner.job import Job, Options
from lightning_3d.tools.planner.memory import states_in_step
from lightning_3d.tools.planner.priced_layout import price_layout
from lightning_3d.tools.planner.profile_module import CostTrace, measured_profile
from lightning_3d.zero.half_weights import cast_parameters
from tests.dryrun.compare import dry, real
from tests.parity import build, long
from tests.zoo.registry import members
from tests.zoo.sized import GPT, Attention, Labelled, Residual, Sized

LAYOUTS = {
    "1": {},
    "2 zero0": {"zero_stage": 0},
    "2 zero1": {"zero_stage": 1},
    "2 zero2": {"zero_stage": 2},
    "2 zero3": {"zero_stage": 3},
    "2 tensor": {"tensor_parallel_size": 2},
    "2 pipeline": {"pipeline_parallel_size": 2},
    "4 both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "2 zbv": {"pipeline_parallel_size": 2, "schedule": "zbv_zero_bubble"},
    "2 dualpipev": {"pipeline_parallel_size": 2, "schedule": "dualpipev"},
    "1 selective": {"recompute": "selective"},
    "2 zero3 full": {"zero_stage": 3, "recompute": "full"},
    "2 tensor full": {"tensor_parallel_size": 2, "recompute": "full"},
    "2 sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "2 sequence full": {"tensor_parallel_size": 2, "sequence_parallel": True, "recompute": "full"},
    "2 pipeline selective": {"pipeline_parallel_size": 2, "recompute": "selective"},
    "4 tensor zero1": {"tensor_parallel_size": 2, "zero_stage": 1},
    "4 hybrid": {"zero_stage": 3, "zero_shard_size": 2},
}
CONTEXTS = {
    "2 context": {"context_parallel_size": 2},
    "3 context": {"context_parallel_size": 3},
    "2 context full": {"context_parallel_size": 2, "recompute": "full"},
    "4 context tensor": {"context_parallel_size": 2, "tensor_parallel_size": 2},
    "4 context pipeline": {"context_parallel_size": 2, "pipeline_parallel_size": 2},
    "4 context zero3": {"context_parallel_size": 2, "zero_stage": 3},
}
KNOWN = LAYOUTS | CONTEXTS
PRECISIONS = {"32": "32-true", "bf16-mixed": "bf16-mixed"}
CONTROL = 96
"""Bytes of counts and logged numbers that a pipeline sends besides activations, and of what rings round up."""
COUNTER = 4
"""Bytes of AdamW's step count of one parameter."""


class ManyWords(GPT):
    """Its logits are 512 MB."""

    def __init__(self):
        super().__init__(width=32, layers=2, vocabulary=2**18, heads=2)


class WideWords(GPT):
    """Its table and its head are most of its weights."""

    rows = 2

    def __init__(self):
        super().__init__(width=128, layers=2, vocabulary=16640, context=32)
        self.head = nn.Linear(128, self.vocabulary, bias=False)


class Convolved(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Conv2d(width, width, 5, padding=2)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.mix(x).permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)


class Convolutions(Sized):
    """Tensor ranks split the MLPs of its blocks, and leave the convolutions whole."""

    rows = 16

    def __init__(self, width=128, layers=4):
        super().__init__()
        self.first, self.head = nn.Conv2d(3, width, 4, 4), nn.Linear(width, 10)
        self.body = nn.Sequential(*[Convolved(width) for _ in range(layers)])

    def batch(self):
        return torch.linspace(-1, 1, self.rows * 3 * 32 * 32).view(self.rows, 3, 32, 32), torch.arange(self.rows) % 10

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.body(self.first(batch[0])).mean((2, 3))), batch[1])


class Retention(Attention):
    """Sums of earlier values that decay, at a rate for each head."""

    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.decay = nn.Parameter(torch.linspace(1.0, 3.0, heads))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        at = torch.arange(x.shape[1])
        weights = self.decay.sigmoid().view(-1, 1, 1).pow((at[:, None] - at).clamp(min=0)).tril()
        return self.out(((q @ k.mT / 4 * weights) @ v).transpose(1, 2).flatten(2))


class Retaining(GPT):
    """A block mixes positions within heads, by other means than attention."""

    def __init__(self):
        super().__init__(width=64, layers=2)
        self.blocks[0].attention = Retention(64, 8)


class Stemmed(Convolutions):
    """A convolution stands in one container with the MLPs."""

    def __init__(self):
        super().__init__(width=256, layers=0)
        stem = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.body, self.first = nn.Sequential(stem, *[Residual(256) for _ in range(4)]), nn.Identity()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.body(batch[0])), batch[1])


class Translator(GPT):
    """An encoder and a decoder: two stacks of blocks of different kinds."""

    def __init__(self, width=256, layers=3):
        super().__init__(width, 0)
        kind, sizes = {"dropout": 0.0, "batch_first": True}, (width, 8, 4 * width)
        encoder, decoder = nn.TransformerEncoderLayer(*sizes, **kind), nn.TransformerDecoderLayer(*sizes, **kind)
        self.encoder = nn.TransformerEncoder(encoder, layers, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, layers)
        self.head, self.places, self.norm = nn.Linear(width, self.vocabulary), nn.Identity(), nn.Identity()

    def forward(self, ids):
        x = self.tokens(ids)
        return self.head(self.decoder(x, self.encoder(x)))


class Transposed(Labelled):
    """Hugging Face's GPT-2 has products that are no `nn.Linear`."""

    def build(self, width, layers):
        from transformers import GPT2Config, GPT2LMHeadModel

        whole = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
        sizes = {"vocab_size": self.vocabulary, "n_positions": self.context}
        sizes |= {"n_embd": width, "n_layer": layers, "n_head": 8}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, **whole, **ends))


HERE = (ManyWords, WideWords, Convolutions, Stemmed, Translator, Transposed, Retaining)


def place(name):
    return f"{__name__ if name in {kind.__name__ for kind in HERE} else 'tests.zoo.sized'}:{name}"


def planned(name, layout, precision):
    """The plan of a module of `SIZED` with one batch for each data rank."""
    module, given = build(place(name)), KNOWN[layout]
    chosen = Strategy3D(**given).settings.base.fit(int(layout.split()[0]))
    chosen = replace(chosen, zero_shard_size=given.get("zero_shard_size"))
    batch = module.batch()
    rows, pipeline = TENSORS.count(batch), chosen.pipeline_parallel_size
    trace = CostTrace(samples=rows, precision=precision)
    run_ahead(module, batch, trace)
    context = chosen.context_parallel_size
    profile, options = measured_profile(module, trace, name=name).sliced(context), Options(context=context)
    samples, pieces = rows * chosen.gradient_ranks, auto_microbatches(rows, pipeline) if pipeline > 1 else 1
    job = Job(profile=profile, samples=samples, batch=samples, precision=precision, options=options)
    where = Cluster(
        accelerator=Catalogue.load().find("cpu", reserved_gb=0), nodes=1, devices_per_node=chosen.world_size
    )
    return replace(price_layout(job, where, among_data(chosen), micro=rows // pieces), layout=chosen)


def assert_as_planned(plan, place, found, counters):
    assert not found.get("error"), found["error"] + found.get("log", "")
    stage = place["pipeline_parallel"]
    states = plan.states(stage)
    assert (states.weights, states.gradients) == (found["parameters"], found["gradients"])
    even = replace(plan, job=replace(plan.job, profile=replace(plan.job.profile, rows=()))).states(stage).optimizer
    # the second of two shards has the rows that are left; optimizers have no states of padding
    moments = 2 * even - states.optimizer if place.data % plan.layout.shards else states.optimizer
    assert 0 <= found["optimizer"] - moments <= COUNTER * counters
    assert_sent(plan, stage, found["sent"])
    assert plan.memory[min(stage, len(plan.memory) - 1)].total == pytest.approx(found["peak"], rel=0.1)


def assert_sent(plan, stage, rows):
    seen, sent = {}, plan.sent(stage)
    for row in rows:
        axis = "data_parallel" if row.axis == "data_replicate" else row.axis
        seen[axis] = seen.get(axis, 0) + row.bytes
    assert {axis: seen[axis] - size for axis, size in sent.items()} == pytest.approx(
        dict.fromkeys(sent, 0), abs=CONTROL
    )
    assert seen.keys() == sent.keys()


def assert_account(name, layout, precision, *, run_real):
    plan, world = planned(name, layout, precision), int(layout.split()[0])
    flags, counters = {"precision": PRECISIONS[precision]}, len(list(build(place(name)).parameters()))
    where = place(name)
    ranks = [vars(rank) for rank in dry(where, f"1x{world}xcpu", KNOWN[layout], flags, ranks=range(world)).ranks]
    if run_real:
        ranks += real(where, world, KNOWN[layout], flags, timeout=300)
    for index, found in enumerate(ranks):
        assert_as_planned(plan, plan.layout.coordinate(index % world), found, counters)


@pytest.mark.parametrize(("name", "layout"), [long("GPT", "2 zero1"), ("GPT", "2 zero3"), long("Words", "2 zero3")])
def test_plan_dry_run_and_real_ranks_agree(name, layout):
    assert_account(name, layout, "bf16-mixed", run_real=True)


@pytest.mark.parametrize(("name", "layout"), [long("BERT", "4 both"), ("Encoder", "1"), long("ViT", "2 zero3")])
def test_plan_and_dry_run_agree(name, layout):
    """A bias next to a tied weight of another stage; copied layers; parameters of one row."""
    assert_account(name, layout, "32", run_real=False)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", ["2 zero1", "2 zero3", "2 pipeline", "4 both", "4 hybrid"])
def test_the_opening_line_has_the_states_of_the_plan(layout, precision):
    plan, module = planned("GPT", layout, precision), build(place("GPT"))
    sizes, halves = plan.layout, cast_parameters(module) if precision.endswith("-mixed") else ()
    split = plan_split(module, num_stages=2) if sizes.pipelined else None
    tensor = plan_tensor(module, 2) if sizes.tensor_parallel_size > 1 else None
    said = with_states(expected_states(module, sizes, split, tensor, halves=halves), MOMENTS["adam"])
    for stage, found in enumerate(said):
        states = states_in_step(plan.job, sizes, stage, plan.microbatches)
        assert vars(found) == pytest.approx(vars(states), rel=0.001)


@pytest.mark.parametrize("name", ["Convolutions", "Stemmed", "Translator", "Transposed"])
def test_modules_that_tensor_ranks_split_in_part(name):
    assert_account(name, "2 tensor", "32", run_real=False)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_large_logits_are_counted_in_parts(precision):
    assert_account("ManyWords", "1", precision, run_real=False)


def test_a_dry_run_counts_weights_that_no_operation_has_returned():
    assert_account("WideWords", "1", "bf16-mixed", run_real=False)


@pytest.mark.parametrize("layout", [long("1 selective"), long("2 tensor full"), "2 sequence"])
def test_recompute_and_sequence_agree(layout):
    """What is kept of a block, the sums that its recomputation sends again, and those of norms on shards."""
    assert_account("GPT", layout, "32", run_real=False)


@pytest.mark.parametrize(
    ("name", "layout", "precision"),
    [
        ("Llama", "2 context", "bf16-mixed"),
        ("Llama", "3 context", "32"),
        ("Retaining", "2 context", "32"),
        ("Retaining", "3 context", "bf16-mixed"),
        ("Retaining", "4 context tensor", "bf16-mixed"),
        ("ViT", "2 context", "32"),
        ("Words", "2 context", "32"),
        ("GPT", "2 context", "bf16-mixed"),
        ("GPT", "3 context", "32"),
        ("GPT", "4 context tensor", "32"),
        long("GPT", "2 context full", "32"),
        long("GPT", "4 context pipeline", "bf16-mixed"),
        long("GPT", "4 context zero3", "32"),
    ],
)
def test_context_ranks_send_what_is_planned(name, layout, precision):
    plan, world = planned(name, layout, precision), int(layout[0])
    ranks = [0, world - 1] if "pipeline" in layout else [world - 1]
    report = dry(place(name), f"1x{world}xcpu", KNOWN[layout], {"precision": PRECISIONS[precision]}, ranks=ranks)
    assert len(report.ranks) == len(ranks)
    for rank in report.ranks:
        assert not rank.error
        assert_sent(plan, plan.layout.coordinate(rank.rank)["pipeline_parallel"], rank.sent)


@pytest.mark.long
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", members("sized"))
def test_every_layout_agrees(name, layout, precision):
    assert_account(name, layout, precision, run_real=True)
