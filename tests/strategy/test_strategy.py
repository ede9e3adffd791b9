"""Strategy3D as a user meets it: good and bad input, what is left after training, launchers."""

import copy
import gc
import os
import pickle
import re
import subprocess
import sys
import time
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.distributed.tensor import DTensor

import lightning_3d
from lightning_3d import Layout, Strategy3D
from lightning_3d.comm.replicate import local
from lightning_3d.errors import ConfigurationError, LayoutError, PeerError
from lightning_3d.module.undo import UndoStack
from lightning_3d.strategy.checks import check_same_layout
from lightning_3d.strategy.steps import EarlyGradients
from lightning_3d.usercode.hooks import finetune_by_identity
from tests.parity import QUIET, in_turn, make_trainer
from tests.workers import on_ranks, run
from tests.zoo.language import GPT, UntiedGPT
from tests.zoo.plain import MLP


def _fit(module, world, epochs=1, **strategy):
    trainer = make_trainer(world, strategy, max_epochs=epochs)
    trainer.fit(module)
    return trainer


@pytest.mark.parametrize("name", ["3d_zero5", "3d_zero", "zero3", "3D_zero1_offload"])
def test_a_guessed_name_is_answered_with_those_that_there_are(name):
    with pytest.raises(ConfigurationError, match=rf"{name.lower()}' is not a registered strategy.* 3d, 3d_zero0, 3d_z"):
        Trainer(**QUIET, devices=1, strategy=name)


@pytest.mark.parametrize("name", ["3d", "3d_zero0", "3d_zero1", "3d_zero2", "3d_zero3", "3d_zero3_offload"])
def test_names_are_registered_on_import(name):
    assert isinstance(StrategyRegistry.get(name), Strategy3D)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"zero_stage": 4}, "zero_stage=4"),
        ({"data_parallel_size": 0}, "data_parallel_size=0"),
        ({"offload": "disk"}, "offload='disk'"),
        ({"grad_sync": "carrier_pigeon"}, "grad_sync='carrier_pigeon'"),
        ({"grad_compression": "zip"}, "grad_compression='zip'"),
        ({"cp_size": 2}, "no argument cp_size.*context_parallel_size"),
        ({"sp_size": 2}, "no argument sp_size.*context_parallel_size"),
        ({"ulysses_degree": 2}, "no argument ulysses_degree.*context_parallel_size"),
        ({"ep_size": 2}, "no argument ep_size.*expert_parallel_size"),
        ({"expert_model_parallel_size": 2}, "no argument expert_model_parallel_size.*expert_parallel_size"),
        ({"expert_parallel_degree": 2}, "no argument expert_parallel_degree.*expert_parallel_size"),
    ],
)
def test_unknown_names_and_values_are_refused_when_built(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        Strategy3D(**arguments)


def _raised(build):
    seed_everything(0, verbose=False)
    began = time.monotonic()
    try:
        build()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return None


def _wrong_product():
    _fit(MLP(), 2, data_parallel_size=3)


def _different_layouts():
    _fit(MLP(), 2, zero_stage=1 + int(os.environ["RANK"]))


def _nothing_to_train():
    class Empty(BoringModel):
        def __init__(self):
            super().__init__()
            del self.layer

    _fit(Empty(), 2)


def _lazy():
    class LateGather(MLP):
        def __init__(self):
            super().__init__()
            self.net = nn.LazyLinear(1)

    _fit(LateGather(), 2)


def _closed():
    class Closed(nn.Parameter):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function.__name__ == "detach":
                raise TypeError("use .tensor")
            return super().__torch_function__(function, types, args, kwargs or {})

    module = MLP()
    module.scale = Closed(torch.ones(3))
    _fit(module, 2)


def _leftover_group():
    dist.init_process_group("gloo")
    dist.barrier()  # a rank that leaves before the other has connected would fail that one
    check_same_layout(Layout(data_parallel_size=4), 4)


def _raise_with(name):
    return _raised(globals()[name])


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("_wrong_product", LayoutError, r"data_parallel_size=3 .* = 3 ranks, but the job has 2"),
        ("_different_layouts", LayoutError, r"rank 1 was given another layout than rank 0"),
        ("_nothing_to_train", ConfigurationError, r"has no parameters"),
        ("_lazy", ConfigurationError, r"lazy parameters"),
        ("_leftover_group", LayoutError, r"left over from an earlier job"),
        ("_closed", ConfigurationError, r"scale is a Closed, which refuses operations of torch \(use .tensor\)"),
    ],
)
def test_bad_input_is_refused_on_every_rank_before_training(case, kind, message):
    for result in run(_raise_with, case, world=2, timeout=120):
        assert result is not None
        assert result[0] == kind.__name__
        assert re.search(message, result[1], re.S)


def _after_fit(stage):
    seed_everything(0, verbose=False)
    module = GPT()
    before = list(module.parameters())
    kind = type(module)
    trainer = _fit(module, 2, zero_stage=stage)
    assert type(module) is kind
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True)), "the same Parameter objects as before"
    assert not any(isinstance(p, DTensor) for p in module.parameters())
    assert module.head.weight is module.embed.weight
    (optimizer,) = trainer.optimizers
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in before}
    assert all(not isinstance(t, DTensor) for s in optimizer.state.values() for t in s.values())
    assert not any(m._forward_pre_hooks or m._forward_hooks or m._state_dict_hooks for m in module.modules())
    module(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    trainer.validate(module, verbose=False)
    _fit(module, 2, zero_stage=stage)  # and again
    return dict(module.state_dict())


@pytest.mark.parametrize(
    "options", in_turn([{"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 3}, {"tensor_parallel_size": 2},
                        {"pipeline_parallel_size": 2}], 2), ids=str,
)  # fmt: skip
@on_ranks(2, group=False)
def test_a_run_that_nobody_refers_to_leaves_memory(options):
    trainer = _fit(GPT(), 2, **options)
    strategy, weight = weakref.ref(trainer.strategy), weakref.ref(trainer.lightning_module.head.weight)
    del trainer
    gc.collect()
    assert strategy() is weight() is None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_module_is_plain_whole_and_usable_after_fit(stage):
    one, two = run(_after_fit, stage, world=2)
    assert all(torch.equal(one[name], two[name]) for name in one)


def _built_before():
    seed_everything(0, verbose=False)

    class Early(MLP):
        def __init__(self):
            super().__init__()
            self.early = [torch.optim.SGD(self.parameters(), lr=0.1)]

        def configure_optimizers(self):
            return self.early[0]

    module = Early()
    before = module.net[0].weight.detach().clone()
    _fit(module, 2, zero_stage=1)
    return float((module.net[0].weight - before).abs().max())


def test_an_optimizer_built_before_placing_is_given_the_placed_parameters():
    assert min(run(_built_before, world=2)) > 0


def _state_on_one_rank():
    from lightning_3d.ranks import talk

    talk.PATIENCE = 1.0

    class Asks(MLP):
        def on_train_batch_end(self, *_):
            if os.environ["RANK"] == "0":
                try:
                    self.state_dict()
                except PeerError as error:
                    self.said = str(error)
            dist.barrier()

    module = Asks()
    module.said = ""
    _fit(module, 2, zero_stage=1)
    return module.said


def test_state_dict_on_one_rank_alone_is_an_error_and_no_hang():
    said = run(_state_on_one_rank, world=2)
    assert "not on rank 1" in said[0]
    assert "call it on every rank" in said[0]


@on_ranks(2, group=False)
def test_no_loop_evaluates_under_inference_mode():
    class Evaluated(MLP):
        modes = ()

        def validation_step(self, batch, batch_idx):
            self.modes = (*self.modes, torch.is_inference_mode_enabled())
            self.within = [loop.inference_mode for loop in loops]
            super().validation_step(batch, batch_idx)

    module = Evaluated()
    trainer = make_trainer(2, {"zero_stage": 3}, num_sanity_val_steps=1)
    loops = trainer.validate_loop, trainer.test_loop, trainer.predict_loop, trainer.fit_loop.epoch_loop.val_loop
    for loop in loops:
        loop.inference_mode = True
    trainer.validate(module, verbose=False)
    assert module.modes
    assert not any([*module.modes, *module.within])
    assert all(loop.inference_mode for loop in loops)


SCRIPT = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_3d

if __name__ == "__main__":
    torch.set_num_threads(1)
    flags = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    strategy = lightning_3d.Strategy3D(start_method="spawn")
    trainer = Trainer(accelerator="cpu", devices=2, max_steps=2, strategy=strategy, **flags)
    trainer.fit(BoringModel())
    assert trainer.strategy.measured.seconds > 0
    print("finished", trainer.global_rank, trainer.world_size, flush=True)
"""


@pytest.mark.long
def test_ranks_are_spawned(tmp_path):  # launch/test_forked.py forks, test_sweep.py there starts a script
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(lightning_3d.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("finished") == 1


def _rank_zero_saves_weights():
    """What DDP users do: only rank 0 asks. With nothing sharded it needs no other rank."""

    class Saves(MLP):
        def on_train_batch_end(self, *arguments):
            if os.environ["RANK"] == "0":
                self.asked = len(self.state_dict()) + len(self.trainer.optimizers[0].state_dict())

    module = Saves()
    _fit(module, 2, zero_stage=0)
    return getattr(module, "asked", 0)


def test_state_dict_on_rank_zero_alone_is_fine_where_nothing_is_sharded():
    assert run(_rank_zero_saves_weights, world=2)[0] > 0


class CopyNotes(Callback):
    """What keeps an average of the weights does, or a callback that looks at other callbacks."""

    def on_train_start(self, trainer, pl_module):
        self.copy, self.before = copy.deepcopy(pl_module), [own.clone() for own in _held(pl_module)]

    def on_train_end(self, trainer, pl_module):
        self.kept = all(map(torch.equal, _held(self.copy), self.before))
        self.trained = not all(map(torch.equal, _held(pl_module), self.before))


def _held(module):
    return [local(parameter).detach() for parameter in module.parameters() if not parameter.is_meta]


@pytest.mark.parametrize(
    "strategy",
    in_turn(
        [{"tensor_parallel_size": 2}, *({"zero_stage": stage} for stage in range(4)), {"pipeline_parallel_size": 2}], 3
    ),
    ids=str,
)
@on_ranks(2, group=False)
def test_the_module_can_be_copied_within_fit(strategy):
    keeper = CopyNotes()
    seed_everything(0, verbose=False)
    make_trainer(2, strategy, callbacks=[keeper], max_steps=2).fit(UntiedGPT())
    assert keeper.kept and keeper.trained


def test_a_copy_of_a_strategy_in_the_middle_of_a_run_undoes_nothing():
    strategy = Strategy3D()
    strategy.run = lambda: None  # it cannot be pickled, as a run
    assert [copied.run for copied in (pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy))] == [None, None]


def test_a_module_that_is_only_connected_can_be_saved(tmp_path):
    """As `Trainer.save_checkpoint` allows with Lightning's own strategies; nothing is known of a run yet."""
    trainer = make_trainer(1, {})
    module = MLP()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    saved = torch.load(tmp_path / "file.ckpt", weights_only=True)["state_dict"]
    torch.testing.assert_close(saved, module.state_dict())


def test_finetuning_warns_of_parameters_that_the_optimizer_has():
    one, other = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))  # equal values
    with UndoStack() as undo:
        finetune_by_identity(undo)
        with pytest.warns(UserWarning, match="already exist within another group of this optimizer"):
            assert BaseFinetuning.filter_on_optimizer(torch.optim.SGD([one]), [one, other]) == [other]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert BaseFinetuning.filter_on_optimizer(torch.optim.SGD([one]), [other]) == [other]


def test_a_checkpoint_is_loaded_before_there_is_a_run(tmp_path):
    """As callbacks and notebooks do through the strategy, with a module that no Trainer has yet, and without one."""
    path = tmp_path / "file.ckpt"
    saving = make_trainer(1, {})
    saving.strategy.connect(MLP())
    saving.save_checkpoint(path)
    loading = make_trainer(1, {})
    assert loading.strategy.load_checkpoint(path)["state_dict"].keys() == MLP().state_dict().keys()
    loading.strategy.connect(MLP())
    assert loading.strategy.load_checkpoint(path)["state_dict"].keys() == MLP().state_dict().keys()


def set_gradient(module, value):
    module.weight.grad = None if value is None else torch.full((1, 1), float(value))


def gradient(module):
    return None if module.weight.grad is None else module.weight.grad.item()


@pytest.mark.parametrize(("zeroed", "total"), [(False, 1 + 2 + 3), (True, 2 + 3)])
def test_a_gradient_that_nobody_zeroes_is_added_with_the_last_batch(zeroed, total):
    module = nn.Linear(1, 1, bias=False)
    early = EarlyGradients(module, list)
    set_gradient(module, 1)
    with early.computing(first=True):
        assert gradient(module) is None
        set_gradient(module, 2)
    assert gradient(module) == 1  # for `zero_grad`, and for hooks before it
    if zeroed:
        set_gradient(module, None)
    early.give(first=True, last=False)
    assert gradient(module) == 2
    with early.computing(first=False):
        set_gradient(module, gradient(module) + 3)
    early.give(first=False, last=True)
    assert gradient(module) == total
    early.give(first=False, last=True)
    assert gradient(module) == total


def test_a_gradient_that_is_zeroed_for_sure_is_freed_before_the_step():
    module = nn.Linear(1, 1, bias=False)
    early = EarlyGradients(module, module.parameters)
    set_gradient(module, 1)
    with early.computing(first=True):
        set_gradient(module, 2)
    assert gradient(module) is None
    early.give(first=True, last=True)
    assert gradient(module) == 2
