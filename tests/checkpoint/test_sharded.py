"""Saved under one layout, loaded under another, saved again: the same bits."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d.checkpoint.stored import Opened, read_tensors
from tests.checkpoint.trainings import resave, train
from tests.parity import in_turn, long, make_trainer
from tests.workers import WorkerError, run
from tests.zoo.base import Base
from tests.zoo.plain import MLP


def contents(directory):
    """Every tensor of a checkpoint, whole, by name, but for what is each rank's own; and everything else."""
    opened = Opened.open(directory)
    opened.verify()
    shared = {name: tensor for name, tensor in opened.tensors.items() if not name.startswith("rank")}
    return {name: tensor.read_full() for name, tensor in shared.items()}, opened.state()


def sharded(**layout):
    return {"checkpoint_format": "sharded", **layout}


HYBRID = {"zero_stage": 3, "zero_shard_size": 2}
TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
ROUTES = [
    ("GPT", "adamw", [(2, {"zero_stage": 1}), (3, {"zero_stage": 3}), (1, {}), (4, {"zero_stage": 2})]),
    ("GPT", "adamw", [(2, TENSOR), (2, PIPELINE), (4, TENSOR | PIPELINE), (4, TENSOR | {"zero_stage": 3}), (1, {})]),
    ("GPT", "sgd", [(1, {}), (4, TENSOR | PIPELINE), (4, PIPELINE | {"zero_stage": 2}), (2, {"zero_stage": 1})]),
    ("GPT", "sgd", [(2, {"zero_stage": 0}), (3, {"zero_stage": 1}), (2, {"zero_stage": 3})]),
    ("MLP", "adamw", [(4, HYBRID), (4, HYBRID | {"grad_sync": "native"}), (2, {"zero_stage": 0}), (4, HYBRID)]),
    ("MLP", "sgd", [(4, HYBRID | {"grad_sync": "native"}), (3, {"zero_stage": 2})]),
]


def grid(tensor, pipeline, world=None, **more):
    return world or tensor * pipeline, {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, **more}


LONG_ROUTES = [
    ("DeepGPT", "adamw", [grid(2, 4), grid(4, 2)]),
    ("DeepGPT", "sgd", [grid(4, 2), grid(2, 4)]),
    ("DeepGPT", "adamw", [grid(1, 4), grid(4, 1), grid(2, 1), grid(1, 4), grid(1, 1), grid(2, 2)]),
    (
        "DeepGPT",
        "sgd",
        [grid(2, 2, zero_stage=0), grid(1, 2, 4, zero_stage=2), grid(4, 1), grid(2, 1, 4, zero_stage=3)],
    ),
]


@pytest.mark.parametrize(("name", "optimizer", "route"), in_turn(ROUTES, 3) + [long(*route) for route in LONG_ROUTES])
def test_tensors_survive_every_change_of_layout(tmp_path, name, optimizer, route):
    world, layout = route[0]
    paths = [tmp_path / f"{index}.ckpt" for index in range(len(route))]
    run(train, name, world, sharded(**layout), 3, None, str(paths[0]), optimizer, world=world, timeout=200)
    for index, (world, layout) in enumerate(route[1:], 1):
        run(
            resave,
            name,
            world,
            sharded(**layout),
            str(paths[index - 1]),
            str(paths[index]),
            optimizer,
            world=world,
            timeout=200,
        )
    wanted, _ = contents(paths[0])
    assert any("exp_avg" in key or "momentum" in key for key in wanted)
    for path in paths[1:]:
        found, _ = contents(path)
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert torch.equal(found[key], tensor), (path, key)


def test_every_rank_writes_its_part(tmp_path):
    run(train, "GPT", 2, sharded(zero_stage=0), 2, None, str(tmp_path / "x.ckpt"), world=2)
    sizes = [file.stat().st_size for file in (tmp_path / "x.ckpt").glob("part-*")]
    assert len(sizes) == 2
    assert max(sizes) < 1.2 * min(sizes)


def test_resume_elsewhere_trains_as_if_nothing_had_happened(tmp_path):
    (wanted,) = run(train, "GPT", 1, None, 15, world=1)
    run(train, "GPT", 2, sharded(zero_stage=1), 5, None, str(tmp_path / "a"), world=2)
    run(train, "GPT", 3, sharded(zero_stage=3), 10, str(tmp_path / "a"), str(tmp_path / "b"), world=3)
    for got in run(train, "GPT", 1, sharded(), 15, str(tmp_path / "b"), world=1):
        torch.testing.assert_close(got["losses"], wanted["losses"][10:], rtol=1e-5, atol=1e-5)
        for key, weight in wanted["weights"].items():
            torch.testing.assert_close(got["weights"][key], weight, rtol=1e-5, atol=1e-5)


def test_state_has_names_and_plain_values(tmp_path):
    run(train, "GPT", 2, sharded(zero_stage=2), 3, None, str(tmp_path / "a"), world=2)
    _, state = contents(tmp_path / "a")
    assert state["global_step"] == 3
    optimizer = read_tensors(state["optimizer_states"][0])
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.1, 0.0]
    assert "blocks.0.c_attn.weight" in optimizer["param_groups"][0]["params"]
    assert optimizer["state"]["blocks.0.c_attn.weight"]["exp_avg"].shape == (48, 16)


def save_weights(path):
    trainer, module = make_trainer(2, sharded(zero_stage=3), quiet=True, max_epochs=1, limit_val_batches=0), MLP()
    trainer.fit(module)
    trainer.save_checkpoint(path, weights_only=True)
    with pytest.raises(KeyError, match="contains only the model"):
        make_trainer(2, TENSOR, quiet=True, max_epochs=2, limit_val_batches=0).fit(MLP(), ckpt_path=path)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_weights_alone_are_saved(tmp_path):
    for wanted in run(save_weights, str(tmp_path / "a"), world=2):
        found = read_tensors(contents(tmp_path / "a")[1]["state_dict"])
        assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


class Counting(torch.optim.SGD):
    """Has a count beside the states of parameters, as MADGRAD has."""

    def step(self, closure=None):
        self.state.setdefault("steps", torch.zeros(())).add_(1)
        for group in self.param_groups:
            group["lr"] = 0.1 / self.state["steps"].item()
        return super().step(closure)


class Counted(MLP):
    def configure_optimizers(self):
        return Counting(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("format", ["sharded", "full"])
def test_a_state_of_no_parameter_is_counted_saved_and_loaded(tmp_path, format):
    (wanted,) = run(train, f"{__name__}:Counted", 1, None, 8, world=1)
    strategy, path = {"pipeline_parallel_size": 2, "checkpoint_format": format}, str(tmp_path / "a")
    run(train, f"{__name__}:Counted", 2, strategy, 4, None, path, world=2)
    for got in run(train, f"{__name__}:Counted", 2, strategy, 8, path, world=2):
        torch.testing.assert_close(got["losses"], wanted["losses"][4:], rtol=1e-5, atol=1e-5)


class Neighbours(torch.nn.Module):
    """A layer on a graph, whose edges are a sparse tensor."""

    def __init__(self, keep):
        super().__init__()
        edges = (torch.arange(36).view(6, 6) % 5 < 2).float()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("edges", edges.to_sparse_csr() if keep == "csr" else edges.to_sparse())
        self.again = edges.to_sparse()

    def forward(self, x):
        spread = [torch.sparse.mm(edges, x.flatten(1).T.reshape(6, -1)) for edges in (self.edges, self.again)]
        return x + self.layer((spread[0] + spread[1]).view(6, 8, -1).permute(2, 0, 1)).tanh()


class OnGraph(Base):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(*[Neighbours(keep) for keep in ("csr", "coo", "csr", "coo")])

    def tensors(self):
        return (torch.randn(self.samples, 6, 8, generator=torch.Generator().manual_seed(0)),)

    def loss(self, batch):
        return (self.blocks(batch[0]) - batch[0].sin()).square().mean()


def save_sharded(path):
    make_trainer(1, sharded(), quiet=True, callbacks=[ModelCheckpoint(path)], enable_checkpointing=True).fit(OnGraph())


def test_sparse_tensors_that_would_be_saved_sharded_are_refused_before_training(tmp_path):
    with pytest.raises(WorkerError, match=r"blocks.0.edges is a sparse tensor, .* checkpoint_format=.full"):
        run(save_sharded, str(tmp_path), world=1)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [{"zero_stage": 3}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_sparse_tensors_of_a_module_train_and_are_saved_in_full(tmp_path, layout):
    (wanted,) = run(train, f"{__name__}:OnGraph", 1, None, 4, world=1)
    for got in run(train, f"{__name__}:OnGraph", 2, layout, 4, None, str(tmp_path / "a"), world=2):
        torch.testing.assert_close(got["losses"], wanted["losses"], rtol=1e-5, atol=1e-5)
    saved = torch.load(tmp_path / "a", weights_only=False)["state_dict"]
    assert saved.keys() == wanted["weights"].keys()
    for key, weight in wanted["weights"].items():
        torch.testing.assert_close(saved[key], weight, rtol=1e-5, atol=1e-5)
