"""A callback that keeps copies of weights: its checkpoints are whole, and it goes on in any layout."""

import pytest
import torch
from lightning.pytorch import Callback

from tests.checkpoint.trainings import build
from tests.parity import long, make_trainer
from tests.workers import WorkerError, run


class Average(Callback):
    """Follows the weights; keeps copies under their names, as a list, or by the square of each."""

    def __init__(self, kept):
        self.kept, self.copies, self.loaded = kept, {}, None

    def on_train_start(self, trainer, module):
        self.copies = {name: weight.detach().clone() for name, weight in module.named_parameters()}
        for name in self.copies if self.loaded is not None else ():
            self.copies[name].copy_(self.loaded[name])

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, *_):
        for name, weight in module.named_parameters():
            self.copies[name].lerp_(weight.detach(), 0.25)

    def state_dict(self):
        if self.kept == "names":
            return {"average": dict(self.copies)}
        if self.kept == "list":
            return {"average": list(self.copies.values())}
        return {"average": {f"square of {name}": copy.square() for name, copy in self.copies.items()}}

    def load_state_dict(self, state):
        average = state["average"]
        self.loaded = average


def train(world, strategy, kept, steps, resume=None, save=None):
    """Train to `steps`; what was averaged in the end, as a checkpoint holds it."""
    module, average = build("DeepGPT"), Average(kept)
    trainer = make_trainer(world, strategy, limit_val_batches=0, max_steps=steps, max_epochs=-1, callbacks=[average])
    trainer.fit(module, ckpt_path=resume)
    trainer.save_checkpoint(save)


SHARDED, FULL = {"checkpoint_format": "sharded"}, {"checkpoint_format": "full"}
TENSOR, PIPELINE, ZERO = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"zero_stage": 3}


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (FULL | TENSOR, FULL | PIPELINE, "names"),
        long(FULL | PIPELINE, FULL | TENSOR, "names"),
        long(FULL | {"zero_stage": 1}, FULL | {"zero_stage": 1}, "names"),
        (SHARDED | TENSOR, FULL | ZERO, "names"),
        long(SHARDED | PIPELINE, FULL | TENSOR, "names"),
        long(FULL | ZERO, FULL | PIPELINE, "names"),
    ],
    ids=str,
)
def test_goes_on_as_on_one_device(tmp_path, before, after, kept):
    """The attention is one fused matrix, of which a tensor rank has three intervals."""
    whole, first, last = (str(tmp_path / name) for name in ("whole.ckpt", "first.ckpt", "last.ckpt"))
    run(train, 1, None, kept, 6, None, whole, world=1)
    run(train, 2, before, kept, 3, None, first, world=2)
    run(train, 2, after, kept, 6, first, last, world=2)
    wanted, got = (torch.load(path)["callbacks"]["Average"]["average"] for path in (whole, last))
    assert len(got) == len(wanted)
    for key in wanted:
        torch.testing.assert_close(got[key], wanted[key], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kept", "key"), [("squares", r"\['square of"), ("list", r"\[0\]")])
def test_a_tensor_without_the_name_of_a_parameter_is_refused(tmp_path, kept, key):
    says = rf"CheckpointError: The callback Average saves checkpoint\['callbacks'\]\['Average'\]\['average'\]{key}"
    with pytest.raises(WorkerError, match=says):
        run(train, 2, FULL | {"zero_stage": 1}, kept, 1, None, str(tmp_path / "x.ckpt"), world=2)
