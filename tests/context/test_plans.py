"""Which blocks are cut, along which arguments, why others stay whole, and what cut ones keep: found on one process."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_3d.activations.recomputed_block import SavedBytes
from lightning_3d.context.cut_attention import attention
from lightning_3d.context.cut_block import patch_block
from lightning_3d.context.find_cuts import plan_context
from lightning_3d.errors import TensorPlanError, UnsupportedError
from lightning_3d.module.undo import UndoStack
from lightning_3d.parallel.parallel_plan import keep_whole_units
from lightning_3d.sandbox.silence import SDPA
from lightning_3d.tensor import sample
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.late_tensor import compute_late
from lightning_3d.tensor.plan_module import SHARED
from lightning_3d.tensor.simulate import run_shards
from tests.context import trained
from tests.parity import silent


def plan(build, ranks=2, **options):
    torch.manual_seed(0)
    module, batches = build()
    with silent():
        return plan_context(
            module, ranks, record_calls(module.train(), lambda: module.loss_of(module.model, batches[0])), **options
        )


class Centred(torch.nn.LayerNorm):
    """A norm over positions and features."""

    def forward(self, x):
        return super().forward(x - x.mean(1, keepdim=True))


def test_what_gathers_behind_the_blocks_has_its_reason():
    def build():
        module, batches = trained.nano("plain", "plain")
        module.model.norm = Centred(trained.WIDTH)
        return module, batches

    found = plan(build)
    assert re.search("output 0 on context rank 0 is off by", found.gathered["model.norm"])
    assert "on all positions: model.norm: output 0" in found.line


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_blocks_that_meet_in_attention_are_cut(ranks):
    found = plan(trained.build_nano, ranks)
    assert not found.whole and len(found.blocks) == 4
    for cut in found.blocks.values():
        assert (cut.stream, cut.dim, cut.results, cut.attention) == (0, 1, {0: 1}, ("divided",))


def test_rotary_tables_are_cut_and_masks_of_pairs_are_whole():
    (cut, *_) = plan(trained.build_padded).blocks.values()
    assert cut.arguments == {2: 1, 3: 1, 4: 1}  # positions, cosines and sines; argument 1 is the mask


def test_eager_attention_is_switched_where_that_is_equal():
    found = plan(trained.build_eager)
    assert not found.whole
    assert all("self_attn" in cut.eager for cut in found.blocks.values())


def test_memory_of_a_decoder_stays_whole():
    for cut in plan(trained.build_decoder).blocks.values():
        assert cut.attention == ("divided", "whole") * 2  # of two layers, which are one block
        assert 1 not in cut.arguments


@pytest.mark.parametrize("kind", ["alibi", "convolution", "recurrence", "products"])
def test_a_block_that_mixes_positions_otherwise_stays_whole(kind):
    found = plan(getattr(trained, f"build_{kind}"))
    assert len(found.whole) == 1 and found.blocks
    assert "positions meet in it in another way" in found.warning
    share = next(iter(found.elements.values())) / sum(found.elements.values())
    assert f"1 blocks ({share:.0%} of the hidden states)" in found.warning


def test_another_kernel_of_hugging_face_is_refused():
    """Its windows and documents are in other arguments than torch's mask."""
    module, batches = trained.build_llama()
    calls = record_calls(module.train(), lambda: module.loss_of(module.model, batches[0]))
    module.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        UnsupportedError, match=r'its attention is flash_attention_2: load .*attn_implementation="sdpa"'
    ):
        plan_context(module, 2, calls)


@pytest.mark.parametrize(("kind", "mixer"), [("retention", "mix"), ("mamba", "mixer"), ("qwen3_5", "linear_attn")])
def test_a_mixer_computes_a_share_of_its_heads(kind, mixer):
    found = plan(getattr(trained, f"build_{kind}"))
    assert not found.whole and next(iter(found.blocks.values())).heads.sequence.entries == (mixer,)
    count = sum(cut.heads is not None for cut in found.blocks.values())
    assert f"part of the sequence ({count} of them on a share of the heads where positions meet)" in found.line


def test_tensor_ranks_divide_the_heads_of_a_mixer_alone():
    assert len(plan(trained.build_retention, alone=False).whole) == 2


def test_a_mixer_inside_of_two_blocks_stays_whole():
    def build():
        module, batches = trained.build_retention()
        module.model.blocks[2].mix = module.model.blocks[0].mix
        return module, batches

    assert plan(build).whole == dict.fromkeys(["model.blocks.0", "model.blocks.2"], SHARED)


def on_ranks_that_divide_heads(use):
    """What `use` gives for a block whose mixer has some of the heads."""
    block, cut = trained.Block("retention", 4, 0.0), plan(trained.build_retention).blocks["model.blocks.0"]

    def call(axis):
        with UndoStack() as undo:
            patch_block(twin := copy.deepcopy(block), cut, Axis(axis.group, weight=2), undo)
            return use(twin)

    with UndoStack() as undo:
        undo.replace(SDPA, attention, [block])
        return run_shards(2, call)


def test_code_outside_of_a_block_reads_all_heads():
    def heads(block):
        return block.mix.heads, block(torch.randn(2, 9, trained.WIDTH)).shape[1], block.mix.heads

    assert on_ranks_that_divide_heads(heads) == [(4, 9, 4)] * 2


def test_a_step_that_goes_on_with_a_cache_is_refused():
    """Blocks get no empty cache, so the second segment would not see the first."""

    def build():
        module, batches = trained.build_llama()

        def loss_of(model, batch):
            first = model(input_ids=batch["ids"][:, :7], use_cache=True)
            return model(input_ids=batch["ids"][:, 7:], past_key_values=first.past_key_values).logits.square().mean()

        module.loss_of = loss_of
        return module, batches

    with pytest.raises(UnsupportedError, match=r"fills a cache and goes on with it \(model.model.layers.0\)"):
        plan(build)


def test_a_mixer_is_refused_outside_of_its_block():
    """Its numbers are those of some heads."""
    with pytest.raises(TensorPlanError, match=r"called outside of .*keep it unsplit: context_parallel_size=1"):
        on_ranks_that_divide_heads(lambda block: block.mix(torch.randn(2, 9, trained.WIDTH)))


class CumulativeSum(nn.Module):
    """Sums of all earlier positions, which no attention shows."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x.cumsum(1)) / 10)


class Pooled(CumulativeSum):
    def forward(self, x):
        return x + self.down(self.up(x).mean(1, keepdim=True).expand(-1, x.shape[1], -1))


class Shifted(CumulativeSum):
    def forward(self, x):
        return x + self.down(self.up(x.roll(1, dims=1)))


class Reversed(CumulativeSum):
    def forward(self, x):
        return x + self.down(self.up(x)).flip(1)


@pytest.mark.parametrize("kind", [CumulativeSum, Pooled, Shifted, Reversed])
def test_a_module_of_which_nothing_can_be_cut_is_refused(kind):
    def build():
        model = nn.Sequential(kind(), kind())
        return trained.Training(model, lambda model, batch: model(batch["x"]).mean()), trained.vector_batches()

    with pytest.raises(UnsupportedError, match=r"divides nothing of Training: .*Use context_parallel_size=1"):
        plan(build)


def test_blocks_in_a_module_that_is_compiled_stay_whole():
    def build():
        module, batches = trained.build_nano()
        module.compile(backend="eager")
        return module, batches

    with pytest.raises(UnsupportedError, match=r"divides nothing of Training: .* it is compiled, or a module around"):
        plan(build)


class Offset(CumulativeSum):
    """Gets a place in the sequence by a hook of the step, as PEFT's aLoRA does. The first values hide what it adds."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.down.weight)

    def forward(self, x):
        return x + self.down(self.up(x))


def by_hook(model, batch):
    handles = [block.up.register_forward_pre_hook(lambda _, args: (args[0][:, :] * 1,)) for block in model]
    try:
        return model(batch["x"]).mean()
    finally:
        [handle.remove() for handle in handles]


def by_results(model, batch):
    """Takes the logits of routers in the first call, as Hugging Face's models do."""
    for block in model:
        block.up.register_forward_hook(lambda *_: None)
    return model(batch["x"]).mean()


def in_eval(model, batch):
    return model.eval()(batch["x"]).mean()


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (by_hook, "a forward hook inside it"),
        (in_eval, "eval mode.*call train"),
        (by_results, "a forward hook inside it"),
    ],
)
def test_a_block_that_its_step_calls_in_another_way_says_so(step, why):
    build = lambda: (trained.Training(nn.Sequential(Offset(), Offset()), step), trained.vector_batches())  # noqa: E731
    with pytest.raises(UnsupportedError, match=f"divides nothing of Training: .*{why}"):
        plan(build)


class Mixed(CumulativeSum):
    """A token-wise block that something is added to."""

    def forward(self, x):
        return x + self.down(self.up(x) * self.mask(x))

    def mask(self, x):
        return 1.0


class Keeps(Mixed):
    """A value for the loss, of the positions that it sees."""

    def mask(self, x):
        self.extra_loss = x.pow(2).mean()
        return 1.0


class Counts(Mixed):
    """A buffer from the positions that it sees."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def mask(self, x):
        self.mean = x.detach().mean((0, 1))
        return 1.0


class Noise(Mixed):
    def mask(self, x):
        return 1 + 0.1 * torch.randn_like(x[..., :1])


class OwnNoise(Mixed):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def mask(self, x):
        return 1 + 0.1 * torch.rand(1, generator=self.generator)


class PathDrop(Mixed):
    """One number for each sample, which all context ranks draw alike."""

    def mask(self, x):
        return x.new_empty(x.shape[0], 1, 1).bernoulli_(0.8)


def mixed(kind):
    def build():
        model = nn.Sequential(Mixed(), kind())
        return trained.Training(model, lambda model, batch: model(batch["x"]).mean()), trained.vector_batches()

    return build


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Keeps, "tensor extra_loss.0, which it keeps"),
        (Counts, "tensor mean.0, which it keeps"),
        (Noise, "it draws random numbers for each position"),
        (OwnNoise, "it draws random numbers from a generator of its own"),
    ],
)
def test_a_block_with_another_effect_stays_whole(kind, why):
    found = plan(mixed(kind))
    assert list(found.blocks) == ["model.0"]
    assert why in found.whole["model.1"]


def test_numbers_that_are_drawn_for_a_sample_are_drawn_alike():
    assert not plan(mixed(PathDrop)).whole


def test_a_block_with_a_hook_inside_stays_whole():
    def build():
        module, batches = trained.build_nano()
        module.model.blocks[1].up.register_forward_hook(lambda *_: None)
        return module, batches

    assert plan(build).whole == {"model.blocks.1": "a forward hook inside it would get a part of the sequence"}


def test_a_short_sequence_is_no_proof():
    def build():
        module, _ = trained.build_nano()
        return module, trained.token_batches(7)

    with pytest.raises(UnsupportedError, match="fewer than 8 positions"):
        plan(build)


@pytest.mark.parametrize(
    ("layers", "why"),
    [(2, "could not run on one batch before training, or optimizes manually"), (1, "no block gets hidden states")],
)
def test_a_module_without_recorded_calls_is_refused(layers, why):
    with pytest.raises(UnsupportedError, match=why):
        plan_context(nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)]), 2, None)


def test_a_long_call_is_recorded_in_part(monkeypatch):
    """A copy of all hidden states of each block would be as large as what the axis saves."""
    monkeypatch.setattr(sample, "LARGE_CALL", 2**10)
    monkeypatch.setattr(sample, "POSITIONS", 12)
    module, batches = trained.build_padded()
    calls = record_calls(module.train(), lambda: module.loss_of(module.model, batches[0]))
    (call, *_) = next(iter(calls.samples.values()))
    hidden, *_ = call.tensors()
    assert hidden.shape == (2, 12, 32) and call.elements == 2 * 17 * 32
    found = plan(trained.build_padded)
    assert not found.whole and str(2 * 17 * 32) in found.line.replace(",", "")


def test_a_pipeline_that_cuts_through_every_block_is_refused():
    found = plan(trained.build_decoder)
    split = SimpleNamespace(stages=[["model.decoder.layers.0"], ["model.decoder.layers.1"]])
    with pytest.raises(
        UnsupportedError, match=r"cuts through each block .*model\.decoder.*Use pipeline_parallel_size=1"
    ):
        keep_whole_units(found, split)


def kept(block, x):
    with SavedBytes(block.parameters()) as saved:
        result = block(x)
    compute_late(result)
    return saved.peak


@pytest.mark.parametrize(("kind", "ranks"), [("plain", 2), ("plain", 4), ("retention", 2)])
def test_a_rank_keeps_its_part(kind, ranks):
    """The result of attention is kept twice: as heads, and as positions."""
    (cut, *_) = plan(lambda: trained.nano(kind), ranks).blocks.values()
    block = trained.Block(kind, 4, 0.0).train()
    x = torch.randn(2, 64, trained.WIDTH, requires_grad=True)
    whole = kept(block, x)

    def on_part(axis):
        twin = trained.Block(kind, 4, 0.0).train()
        with UndoStack() as undo:
            patch_block(twin, cut, Axis(axis.group, weight=ranks), undo)
            return kept(twin, x)

    with UndoStack() as undo:
        undo.replace(SDPA, attention, [block])
        for part in run_shards(ranks, on_part):
            assert part == pytest.approx(whole / ranks, rel=0.1), (part, whole)
