"""What a Trainer over a pipeline costs and keeps: memory, messages, and ends of ranks."""

import os
import re
import signal
from contextlib import nullcontext

import pytest
from lightning.pytorch import Callback, seed_everything

from lightning_3d import Strategy3D
from lightning_3d.errors import UnsupportedError
from lightning_3d.tensor.late_tensor import LateTensor
from tests.parity import assert_parity, long, make_trainer
from tests.workers import WorkerError, WorkerHang, run
from tests.zoo.language import GPT, UntiedGPT


def fit(module, world, flags=None, **strategy):
    seed_everything(0, verbose=False)
    make_trainer(world, strategy, quiet=True, max_epochs=1, limit_val_batches=0, **flags or {}).fit(module)
    return module


def size(tensors):
    """Of the memory behind `tensors`, each storage once."""
    real = [tensor for tensor in tensors if not tensor.is_meta]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in real}.values())


class Weighed(UntiedGPT):
    """Weighs what this rank holds after an optimizer step. A hook assigns gradients, also of other stages."""

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad = parameter.grad * 0.5

    def on_train_batch_end(self, *arguments):
        super().on_train_batch_end(*arguments)
        (optimizer,) = self.trainer.optimizers
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.warns(UserWarning, match="states of a stage's own") if self.global_rank == 0 else nullcontext():
            assert not any(parameter.is_meta for parameter in optimizer.state), "steps what other stages own"
        other = next(parameter for parameter in self.parameters() if parameter.is_meta)
        for reads in (optimizer.state.get, optimizer.state.__getitem__, lambda each: each in optimizer.state):
            with pytest.raises(UnsupportedError, match="of a weight that another stage of the pipeline owns"):
                reads(other)
        states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.held = size(self.parameters()), size(grads), size(states)


def weigh():
    module = Weighed()
    whole, split = {name: size(part.parameters()) for name, part in module.named_modules()}, []
    module.on_train_start = lambda: split.append(module.trainer.strategy.run.placed.stages.split)
    fit(module, 2, pipeline_parallel_size=2)
    shares = [sum(whole[name] for name in names) / whole[""] for names in split[0].stages]
    return [part / whole[""] for part in module.held], shares


def test_a_stage_holds_its_share_of_parameters_gradients_and_states():
    for rank, ((parameters, grads, states), shares) in enumerate(run(weigh, world=2)):
        assert parameters == pytest.approx(shares[rank], rel=0.05)
        assert grads == pytest.approx(shares[rank], rel=0.05)
        assert states == pytest.approx(2 * shares[rank], rel=0.05)


def sent(microbatches, zero):
    """Calls and bytes over the data axis in one epoch."""
    module, rows = UntiedGPT(), []
    module.on_train_end = lambda: rows.extend(module.trainer.strategy.data_axis.ledger.rows())
    fit(module, 4, pipeline_parallel_size=2, zero_stage=zero, num_microbatches=microbatches)
    return [(row.collective, row.calls, row.bytes) for row in rows if row.axis == "data_parallel"]


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_are_reduced_once_per_step(zero):
    one, many = (run(sent, count, zero, world=4, timeout=120) for count in (1, 6))
    assert one == many
    assert all(one)


class Peeking(GPT):
    def forward(self, tokens):
        logits = super().forward(tokens)
        if isinstance(logits, LateTensor):
            self.trainer.peeked = True
        return logits

    def on_train_end(self):
        strategy = self.trainer.strategy
        if isinstance(strategy, Strategy3D) and strategy.coordinate["pipeline_parallel"] == 1:
            assert getattr(self.trainer, "peeked", False), "logits were gathered"


def test_logits_stay_in_parts_on_the_last_stage():
    strategy = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert_parity("tests.pipeline.test_trained:Peeking", 4, strategy)


class Struck(UntiedGPT):
    """Rank 1 is struck in the middle of its third step."""

    number = signal.SIGKILL
    forwards = 0

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2 and self.trainer.global_rank == 1:
            self.head.register_forward_pre_hook(self.strike)

    def strike(self, *_):
        self.forwards += 1
        if self.forwards == 2:
            os.kill(os.getpid(), self.number)


class Noted(Callback):
    """Writes down what a rank raised, as soon as it does."""

    def __init__(self, folder):
        self.folder = folder

    def on_exception(self, trainer, module, exception):
        (self.folder / f"rank{trainer.global_rank}").write_text(f"{type(exception).__name__}: {exception}")


def struck(number, folder):
    module = Struck()
    module.number = number
    flags = {"callbacks": [Noted(folder)]}
    fit(module, 2, flags, pipeline_parallel_size=2, num_microbatches=4, timeout=3.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, long(signal.SIGSTOP)])
def test_a_rank_that_dies_or_stops_is_named(number, tmp_path):
    with pytest.raises((WorkerError, WorkerHang)):
        run(struck, number, tmp_path, world=2, timeout=30)
    said = (tmp_path / "rank0").read_text()
    who = r"PeerError: Rank 1 \(pipeline 1, data 0, tensor 0\) does not answer any more"
    assert re.match(who + r".* \(Pipeline: stage 0, microbatch \d: .*gradients from stage 1", said)
