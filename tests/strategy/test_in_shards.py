"""`teardown`: after a run the module stays in shards, and the next run goes on with them."""

import copy
import gc
import io
import re
import weakref

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import WeightAveraging

from lightning_3d import Strategy3D
from lightning_3d.checkpoint.full_files import consolidate
from lightning_3d.errors import ConfigurationError, UnsupportedError
from lightning_3d.layout import Layout
from lightning_3d.strategy import in_shards, placing
from lightning_3d.strategy.in_shards import shards_of
from tests.parity import layouts, long, make_trainer
from tests.workers import run
from tests.zoo.language import GPT

LAYOUTS = layouts("zero3", "tensor", "pipeline", "tensor-pipeline", "tensor-zero3", "pipeline-zero1", "zero1")
SHORT = ("zero3",)


class Net(GPT):
    def test_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self(torch.arange(8)[None] + batch_idx).abs().sum()

    def test_dataloader(self):
        return self._loader()

    def predict_dataloader(self):
        return self._loader()


def _trainer(world, strategy, **settings):
    return make_trainer(world, strategy, quiet=True, **settings, max_epochs=1, limit_val_batches=1)


def _runs(world, strategy, folder):
    """Evaluate, fit, evaluate in another Trainer, fit again, and load the last checkpoint into a whole module."""
    seed_everything(7, verbose=False)
    module = Net()
    here = [_bytes(module)]
    trainer = _trainer(world, strategy)
    first = trainer.validate(module, verbose=False)
    here.append(_bytes(module))
    trainer.fit(module)
    here.append(_bytes(module))
    trainer.save_checkpoint(f"{folder}/between.ckpt")
    second = trainer.validate(module, verbose=False)
    other = _trainer(world, strategy)
    third = other.test(module, verbose=False)
    predicted = torch.stack(other.predict(module))
    other.fit(module)
    here.append(_bytes(module))
    other.save_checkpoint(f"{folder}/end.ckpt")
    fourth = other.validate(module, ckpt_path=f"{folder}/between.ckpt", verbose=False)
    here.append(_bytes(module))
    fifth = other.validate(module, ckpt_path=f"{folder}/end.ckpt", verbose=False)
    state = module.state_dict()
    return {
        "results": [result[0]["val_loss"] for result in (first, second, third, fourth, fifth)],
        "predicted": predicted,
        "losses": module.seen,
        "state": {name: value.clone() for name, value in state.items()},
        "bytes": here,
        "module": {name: tuple(each.shape) for name, each in module.named_parameters()},
    }


def _bytes(module):
    local = [each.to_local() if hasattr(each, "to_local") else each for each in module.parameters()]
    with torch._C.DisableTorchFunctionSubclass():  # between runs memory is not to be used
        return sum(each.untyped_storage().nbytes() for each in local if not each.is_meta)


@pytest.mark.parametrize("layout", [name if name in SHORT else long(name) for name in LAYOUTS])
def test_runs_go_on_with_shards_as_one_device_does_with_the_module(layout, tmp_path):
    world, strategy = LAYOUTS[layout]
    (tmp_path / "one").mkdir()
    (wanted,) = run(_runs, 1, None, str(tmp_path / "one"), world=1)
    sharded = layout in ("tensor-pipeline", "zero1")
    strategy = {**strategy, "teardown": "sharded", "checkpoint_format": "sharded" if sharded else "full"}
    everywhere = run(_runs, world, strategy, str(tmp_path), world=world, timeout=120)
    for got in everywhere:
        torch.testing.assert_close(got["results"], wanted["results"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got["predicted"], wanted["predicted"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got["losses"], wanted["losses"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got["state"], wanted["state"], rtol=1e-4, atol=1e-5)
        assert got["module"] == wanted["module"]
        whole, *later = got["bytes"]
        assert max(later) < 0.9 * whole
    for name in ("between.ckpt", "end.ckpt"):
        if sharded:
            (tmp_path / name).rename(tmp_path / "directory")
            consolidate(tmp_path / "directory", tmp_path / name)
            (tmp_path / "directory").rename(tmp_path / f"{name}.directory")
        states = [torch.load(tmp_path / folder / name, weights_only=False)["state_dict"] for folder in (".", "one")]
        torch.testing.assert_close(states[0], states[1], rtol=1e-4, atol=1e-5)


def _changed(change):
    """What a second run says, of which something is changed."""
    seed_everything(7, verbose=False)
    module = Net()
    _trainer(2, {"zero_stage": 3, "teardown": "sharded"}).fit(module)
    strategy, settings = {"zero_stage": 3, "teardown": "sharded"}, {}
    if change == "layout":
        strategy = {"tensor_parallel_size": 2}
    if change == "built again":
        module.configure_model = lambda: setattr(module, "norm", torch.nn.LayerNorm(16))
    if change == "average":
        settings = {"callbacks": [WeightAveraging()]}
    if change == "verify":
        strategy["verify"] = "first_step"
    try:
        _trainer(2, strategy, **settings).fit(module)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    vars(module).pop("configure_model", None)
    trainer = _trainer(2, {"zero_stage": 3, "teardown": "whole"})
    if change == "built again":
        return said
    trainer.validate(module, verbose=False)
    assert shards_of(module) is None
    assert [each.shape for each in module.parameters() if type(each.data) is torch.Tensor and not each.is_meta] == [
        each.shape for each in Net().parameters()
    ]
    _trainer(2, {"tensor_parallel_size": 2}).fit(module)
    return said


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("layout", r"would divide otherwise: .*tensor_parallel_size=2 \(was 1\).*teardown=\"whole\" makes it whole"),
        long("built again", "'norm.weight' is another parameter"),
        long("average", "WeightAveraging copies the whole module"),
        long("verify", 'verify="first_step" copies the whole module'),
    ],
)
def test_another_division_is_refused_and_a_last_run_makes_the_module_whole(change, text):
    for said in run(_changed, change, world=2):
        assert re.search(text, said)


class Resets(Net):
    """Gives a block new values at the start of a run, and notes a number of them."""

    starts = False

    def on_fit_start(self):
        if self.starts:
            torch.manual_seed(5)
            self.blocks[0].mlp[0].reset_parameters()
            self.seen.append(float(self.blocks[0].mlp[0].weight.norm()))


def _save(module):
    torch.save(module, io.BytesIO())


def _write(module):
    with torch.no_grad():
        module.head.weight[0] = 0.0


REFUSED = {
    "norm": lambda module: float(module.head.weight.norm()),
    "detach": lambda module: module.blocks[0].mlp[0].weight.detach(),
    "__get__": lambda module: module.norm.weight.data,
    "kaiming_uniform_": lambda module: module.head.reset_parameters(),
    "__setitem__": _write,
    "copied or pickled": copy.deepcopy,
    "pickled": _save,
    "_foreach_norm": lambda module: torch._foreach_norm(list(module.parameters())),
}


def _between(world, strategy):
    seed_everything(7, verbose=False)
    module = Resets()
    copies = []
    if strategy is not None:
        module.on_train_end = lambda: copies.append(copy.deepcopy(module))
    _trainer(world, strategy).fit(module)
    said, numbers = {}, []
    for name, code in REFUSED.items() if strategy is not None else ():
        try:
            code(module)
        except UnsupportedError as error:
            said[name] = str(error)
    try:
        with torch.no_grad():
            numbers = [float(part.abs().sum()) for part in (module(torch.arange(8)[None]), module.norm(torch.ones(16)))]
    except UnsupportedError as error:
        said["forward"] = str(error)
    for copied in (copy.copy(module), *copies) if strategy is not None else ():
        try:
            _trainer(world, strategy).validate(copied, verbose=False)
        except ConfigurationError as error:
            said["copy"] = said.get("copy", "") + str(error)
    norms = [float(value.norm()) for value in module.state_dict().values()]
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    module.starts = strategy is None or "pipeline_parallel_size" not in strategy
    del module.seen[:]
    _trainer(world, strategy).fit(module)
    return {"said": said, "numbers": numbers, "norms": norms, "shapes": shapes, "seen": module.seen}


@pytest.mark.parametrize("layout", ["zero3", long("tensor"), long("pipeline")])
def test_between_runs_values_of_shards_are_refused_and_states_and_forwards_are_those_of_one_device(layout):
    world, strategy = LAYOUTS[layout]
    pipelined = layout == "pipeline"
    (wanted,) = run(_between, 1, None, world=1)
    for got in run(_between, world, {**strategy, "teardown": "sharded"}, world=world):
        for name in REFUSED:
            assert name in got["said"][name]
            assert 'teardown="whole"' in got["said"][name]
        assert "is a copy of a module that an earlier run has left in shards" in got["said"]["copy"]
        assert "The module is a copy of one in shards" in got["said"]["copy"]
        assert ("Call it in predict_step" in got["said"].get("forward", "")) == pipelined
        torch.testing.assert_close(got["norms"], wanted["norms"], rtol=1e-4, atol=1e-5)
        assert got["shapes"] == wanted["shapes"]
        if not pipelined:
            torch.testing.assert_close(got["numbers"], wanted["numbers"], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(got["seen"], wanted["seen"], rtol=1e-4, atol=1e-5)


def _after_error():
    module = Net()
    module.on_train_end = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        _trainer(2, {"zero_stage": 3, "teardown": "sharded"}).fit(module)
    return shards_of(module) is None


def _gone(world, strategy):
    """Return True if nothing keeps a module in shards once its user has gone."""

    def user():
        module = Net()
        _trainer(world, {**strategy, "teardown": "sharded"}).fit(module)
        return weakref.ref(module)

    module = user()
    gc.collect()
    return module() is None


@pytest.mark.parametrize("layout", [name if name in SHORT else long(name) for name in LAYOUTS])
def test_shards_are_freed_with_their_module(layout):
    world, strategy = LAYOUTS[layout]
    assert all(run(_gone, world, strategy, world=world))


def test_after_an_error_there_are_no_shards_to_go_on_with():
    assert all(run(_after_error, world=2))


def _auto(share):
    before, in_shards.SHARE = in_shards.SHARE, share
    said = []
    placing.rank_zero_info, info = said.append, placing.rank_zero_info
    try:
        module, trainer = Net(), _trainer(2, {"zero_stage": 3})
        trainer.fit(module)
        found = [shards_of(module) is not None]
        in_shards.SHARE = before  # what is in shards stays so
        trainer.validate(module, verbose=False)
        return [*found, shards_of(module) is not None], said
    finally:
        in_shards.SHARE, placing.rank_zero_info = before, info


def test_auto_leaves_shards_where_the_whole_has_no_room_and_says_so_once():
    assert run(_auto, in_shards.SHARE, world=2) == [([False, False], [])] * 2
    for found, said in run(_auto, 1e-9, world=2):
        assert found == [True, True]
        assert len(said) == 1
        assert "Net stays in shards" in said[0]


def test_processes_that_end_leave_no_shards():
    run_ends = {"ends": True, "ranks_of_host": 2, "device": torch.device("cpu")}
    layout = Layout(data_parallel_size=2, zero_stage=3)
    with pytest.raises(UnsupportedError, match=r"the processes of this run end with it.*torchrun"):
        in_shards.stays_in_shards("sharded", Net(), layout, [], **run_ends)
    assert not in_shards.stays_in_shards("auto", Net(), layout, [], **run_ends)


def test_unknown_values_are_refused():
    with pytest.raises(ConfigurationError, match="teardown='none' is not one of 'whole', 'sharded', 'auto'"):
        Strategy3D(teardown="none")
