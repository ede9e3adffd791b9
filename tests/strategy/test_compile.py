"""Each line of docs/compile.md: compiled modules train as uncompiled ones on one device, or are refused."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lightning_3d.errors import UnsupportedError
from tests.parity import assert_parity, assert_same, caught_warnings, long, make_trainer, reference, train
from tests.workers import on_ranks, run
from tests.zoo import MODULES
from tests.zoo.language import GPT, Llama

BACKEND = "aot_eager"


class InPlace(GPT):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.compile(backend=BACKEND)


def wrap(blocks, **options):
    for at, block in enumerate(blocks):
        blocks[at] = torch.compile(block, **options)


class Wrapped(GPT):
    def __init__(self):
        super().__init__()
        wrap(self.blocks, backend=BACKEND)


class Mixed(Wrapped):
    """Every second block is compiled in the other way."""

    def __init__(self):
        super().__init__()
        for at in range(1, len(self.blocks), 2):
            self.blocks[at] = self.blocks[at]._orig_mod
            self.blocks[at].compile(backend=BACKEND)


class AsAWhole(GPT):
    def __init__(self):
        super().__init__()
        self.compile(backend=BACKEND)


class WrappedTwice(AsAWhole, Wrapped):
    """Its blocks are compiled, and so is the whole."""


class Inductor(GPT):
    def __init__(self):
        super().__init__()
        wrap(self.blocks)


class CompiledLlama(Llama):
    def __init__(self):
        super().__init__()
        for block in self.model.model.layers:
            block.compile(backend=BACKEND)


class InsideModule(Llama):
    """The form of torch's tutorials: the model is one attribute of the LightningModule."""

    def __init__(self):
        super().__init__()
        self.model = torch.compile(self.model, backend=BACKEND)


class Beside(GPT):
    """A compiled chain besides the blocks: compiled code with the hooks of a pipeline inside never ended."""

    def __init__(self):
        super().__init__()
        self.before = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), backend=BACKEND)

    def forward(self, tokens):
        x = self.before(self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Dropout(GPT):
    """With masks that differ by tensor rank, and some that do not."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.mlp = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.Linear(64, 16), nn.Dropout(0.2))


class WrappedDropout(Wrapped, Dropout):
    pass


class WithoutRate(Dropout):
    """The remedy of the warning."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.mlp[1].p = 0.0
        wrap(self.blocks, backend=BACKEND)


class BehindTheSum(Dropout):
    """Dropout on all features only."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            del block.mlp[1]
        wrap(self.blocks, backend=BACKEND)


class DropoutInPlace(InPlace, Dropout):
    pass


def _compiled(kind, world, strategy, attributes, trainer):
    torch._dynamo.reset()
    counters.clear()
    got = train(f"{__name__}:{kind}", world, strategy, attributes, trainer)
    plain = {"weights": _plain(got["weights"]), "gradients": [*map(_plain, got["gradients"])]}
    return {**got, **plain}, counters["stats"]["unique_graphs"], list(counters["graph_break"])


def _plain(named):
    """By the names that the module has where its blocks are not wrapped."""
    return {name.replace("_orig_mod.", ""): value for name, value in named.items()}


ZERO_3, TENSOR, PIPELINE = {"zero_stage": 3}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
TENSOR_ZERO_3, TENSOR_PIPELINE = {**TENSOR, **ZERO_3}, {**TENSOR, **PIPELINE}
SEQUENCE, RECOMPUTE = {**TENSOR, "sequence_parallel": True}, {**TENSOR, "recompute": "selective"}
SOME = {"recompute": "auto", "recompute_budget": 4e5}
ONE_GRAPH = [
    ("InPlace", {"zero_stage": 0}),
    ("Wrapped", ZERO_3),
    ("InPlace", TENSOR),
    ("Wrapped", TENSOR),
    ("CompiledLlama", TENSOR),
    ("Inductor", TENSOR),
    ("InPlace", SEQUENCE),
    ("Wrapped", SEQUENCE),
    ("Wrapped", RECOMPUTE),
]
"""All blocks run one graph, which nothing breaks."""


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        long("InPlace", TENSOR),
        long("InPlace", {"zero_stage": 0}),
        long("Wrapped", {"zero_stage": 0}),
        long("AsAWhole", {"zero_stage": 0}),
        long("InPlace", {"zero_stage": 1}),
        long("InPlace", ZERO_3),
        long("Wrapped", ZERO_3),
        long("AsAWhole", ZERO_3),
        long("Wrapped", TENSOR),
        long("AsAWhole", TENSOR),
        long("CompiledLlama", TENSOR),
        long("Inductor", TENSOR),
        long("InPlace", SEQUENCE),
        long("Wrapped", SEQUENCE),
        long("Wrapped", RECOMPUTE),
        long("Wrapped", {**ZERO_3, "recompute": "full"}),
        long("Wrapped", {**TENSOR, **SOME}),
        long("InPlace", {**ZERO_3, **SOME}),
        long("Wrapped", TENSOR_ZERO_3),
        long("InPlace", TENSOR_ZERO_3),
        long("Wrapped", TENSOR_PIPELINE),
        long("Wrapped", PIPELINE),
        long("Inductor", ZERO_3),
        long("CompiledLlama", {"zero_stage": 2}),
        long("InsideModule", {"zero_stage": 2}),
        long("InsideModule", ZERO_3),
        long("InsideModule", TENSOR),
    ],
)
def test_it_trains_as_uncompiled_on_one_device(kind, strategy):
    attributes, flags = {"optimizer": "plain_sgd"}, {"max_epochs": 2}  # ZeRO compiles after three steps
    wanted = reference("Llama" if kind in ("CompiledLlama", "InsideModule") else "GPT", attributes, flags)
    world = 4 if strategy in (TENSOR_ZERO_3, TENSOR_PIPELINE) else 2
    got = run(_compiled, kind, world, strategy, attributes, flags, world=world, timeout=300)
    assert_same([each for each, _, _ in got], wanted, 1e-4)
    assert all(graphs for _, graphs, _ in got)
    if (kind, strategy) in ONE_GRAPH:
        assert [counted for _, *counted in got] == [[1, []]] * world


@pytest.mark.long
@pytest.mark.parametrize("kind", ["WrappedDropout", "DropoutInPlace"])
def test_dropout_on_shards_draws_the_masks_of_uncompiled_code(kind):
    attributes, flags = {"optimizer": "plain_sgd"}, {"max_epochs": 1}
    plain = run(train, f"{__name__}:Dropout", 2, TENSOR, attributes, flags, world=2)
    got = run(_compiled, kind, 2, TENSOR, attributes, flags, world=2, timeout=300)
    assert_same([each for each, _, _ in got], plain[0], 1e-5)


def _warned(kind):
    torch._dynamo.reset()
    counters.clear()
    with caught_warnings() as texts:
        _fit(kind, TENSOR)
    return [text for text in texts if "dropout acts on shards" in text], counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("kind", "how"), [("WrappedDropout", "run uncompiled in training"), long("DropoutInPlace", "run in several graphs")]
)
def test_dropout_on_shards_of_compiled_blocks_is_warned_of_once(kind, how):
    (first, graphs), (second, _) = run(_warned, kind, world=2, timeout=120)
    assert [how in text for text in first] == [True]
    assert second == []  # rank 0 speaks for all
    assert (graphs == 0) == (kind == "WrappedDropout")


@pytest.mark.parametrize("kind", ["WithoutRate", "BehindTheSum"])
def test_without_dropout_on_shards_blocks_are_one_graph(kind):
    assert run(_warned, kind, world=2, timeout=120) == [([], 1), ([], 1)]


def _fit(kind, strategy):
    module = globals()[kind]()
    make_trainer(2, strategy, quiet=True, max_steps=1).fit(module)


@pytest.mark.parametrize("kind", ["InPlace", "AsAWhole", "InsideModule"])
def test_a_pipeline_refuses_hooks_in_compiled_code(kind):
    run(_refused, kind, world=2)


def test_a_pipeline_keeps_another_compiled_chain_whole():
    assert_parity("tests.strategy.test_compile:Beside", 2, PIPELINE, trainer={"max_epochs": 1})


def _refused(kind, strategy=PIPELINE, words=r"Wrap the blocks instead: blocks\[i\] = torch\.compile"):
    with pytest.raises(UnsupportedError, match=words):
        _fit(kind, strategy)


@pytest.mark.parametrize(("kind", "strategy"), [("Mixed", ZERO_3), ("WrappedTwice", {"zero_stage": 1})])
def test_zero_refuses_wrapped_blocks_beside_others(kind, strategy):
    """`Wrapped` and `InPlace` above are the remedies."""
    run(_refused, kind, strategy, "Compile all blocks in one way and nothing around them", world=2)


@on_ranks(1, group=False)
def test_lightning_itself_refuses_a_compiled_module():
    module = torch.compile(MODULES["GPT"](), backend=BACKEND)
    with pytest.raises(RuntimeError, match="Using a compiled model is incompatible with the current strategy"):
        make_trainer(1, {}, quiet=True, max_steps=1).fit(module)
