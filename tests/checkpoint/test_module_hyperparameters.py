"""A module that is given its network, and saves all its arguments as hyperparameters."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch.nn import functional as F

from tests.parity import caught_warnings, make_trainer
from tests.workers import run
from tests.zoo.base import Base


class Given(Base):
    """Its network comes from outside, as in the Lightning-Hydra template."""

    def __init__(self, net, also, activation, width):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net

    def tensors(self):
        x = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
        return x, x.sum(1, keepdim=True)

    def loss(self, batch):
        return F.mse_loss(self.net(batch[0]), batch[1])


def given():
    activation = nn.Tanh()  # as deeptab's, which stands between the blocks too
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)]
    net = nn.Sequential(blocks[0], activation, blocks[1], activation, nn.Linear(8, 1))
    return net, [net[0]], activation, 8


def saved(strategy, file):
    seed_everything(1, verbose=False)
    module = Given(*given())
    trainer = make_trainer(2, {**strategy, "timeout": 60}, max_epochs=1)
    module.on_train_batch_end = lambda *_: trainer.save_checkpoint(file)
    with caught_warnings() as seen:
        trainer.fit(module)  # not quiet: the monitor has hooks on blocks
    return [text for text in seen if "hyperparameter" in text], dict(module.state_dict())


@pytest.mark.filterwarnings("ignore:Attribute '.*' is an instance of `nn.Module`")  # Lightning's own advice
@pytest.mark.parametrize("strategy", [{"zero_stage": 3}, {"pipeline_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("format", ["full", "sharded"])
def test_the_network_is_left_out_of_the_hyperparameters(strategy, format, tmp_path):
    file = str(tmp_path / "saved.ckpt")
    (told, weights), _ = run(saved, {**strategy, "checkpoint_format": format}, file, world=2)
    assert "Checkpoints have no hyperparameter net, also" in told[0]
    if format == "sharded":
        assert Path(file).is_dir()
        return
    checkpoint = torch.load(file, weights_only=False)
    assert {*checkpoint["hyper_parameters"]} == {"activation", "width"}
    net, also, *_ = given()
    loaded = Given.load_from_checkpoint(file, weights_only=False, net=net, also=also)
    torch.testing.assert_close(dict(loaded.state_dict()), weights)
