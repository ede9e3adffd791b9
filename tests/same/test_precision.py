"""Every precision in every kind of layout; the loss scale and who decides on it."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import MixedPrecision

from lightning_3d import Precision3D, Strategy3D
from lightning_3d.errors import ConfigurationError
from lightning_3d.precision import convert, unscale
from tests.parity import QUIET, assert_parity, in_turn, layouts, long, make_trainer, reference, train
from tests.workers import on_ranks, run
from tests.zoo.plain import MLP

LAYOUTS = layouts("zero0", "zero3", "tensor", "pipeline", "pipeline-zero1", "tensor-zero2")


@pytest.mark.parametrize("layout", ["zero3", "tensor", "pipeline"])
def test_double(layout):
    trainer = {"precision": "64-true", "gradient_clip_val": 0.5, "max_epochs": 2}
    assert_parity("MLP", *LAYOUTS[layout], tolerance=1e-12, trainer=trainer)


@pytest.mark.parametrize("layout", ["zero3", "tensor", "pipeline"])
@pytest.mark.parametrize(("precision", "eps"), in_turn([("bf16-true", 2**-7), ("16-true", 2**-10)], 2))
def test_half(layout, precision, eps):
    world, strategy = LAYOUTS[layout]
    trainer = {"precision": precision, "max_epochs": 2}
    attributes = {"optimizer": "plain_sgd"}
    wanted = reference("MLP", attributes, trainer)
    for got in run(train, "MLP", world, strategy, attributes, trainer, world=world):
        assert {weight.dtype for weight in got["weights"].values()} == {getattr(torch, _DTYPES[precision])}
        torch.testing.assert_close(got["losses"], wanted["losses"], rtol=8 * eps, atol=8 * eps)


def test_stages_of_tensor_ranks_are_compared_with_the_rounding_of_their_precision():
    strategy = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    attributes, trainer = {"optimizer": "plain_sgd"}, {"precision": "bf16-true", "max_epochs": 1}
    wanted = reference("UntiedGPT", attributes, trainer)["losses"]
    for got in run(train, "UntiedGPT", 4, strategy, attributes, trainer, world=4):
        torch.testing.assert_close(got["losses"], wanted, rtol=2**-4, atol=2**-4)


_DTYPES = {"bf16-true": "bfloat16", "16-true": "float16"}


class Overflowing(MLP):
    """One sample of one batch, which the last data rank sees, is too large for fp16.

    Its gradients are infinite where it enters, in the first stage, and finite behind a tanh.
    """

    def tensors(self):
        x, y = super().tensors()
        x[2 * self.batch_size - 1, 0] = 1e6
        return x, y


class Scales(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, *args):
        self.seen.append(trainer.precision_plugin.scaler.get_scale())


def _scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)


def _fit_scaled(strategy, world, path=None, resume=None, epochs=2, **flags):
    seed_everything(7, verbose=False)
    module, scales = Overflowing(), Scales()
    kind = Precision3D if strategy is not None else MixedPrecision
    chosen = Strategy3D(**strategy) if strategy is not None else "auto"
    flags = {"devices": world, "strategy": chosen, "max_epochs": epochs, "limit_val_batches": 0, **flags}
    flags["plugins"] = [kind("16-mixed", "cpu", _scaler())]
    trainer = Trainer(**{**QUIET, **flags, "callbacks": [scales]})
    trainer.fit(module, ckpt_path=resume)
    if path is not None:
        trainer.save_checkpoint(path)
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return scales.seen, weights, module.seen


def _same(got, wanted):
    scales, weights, losses = got
    assert scales == wanted[0]
    bound = 16 * torch.finfo(torch.float16).eps
    torch.testing.assert_close(losses, wanted[2], rtol=bound, atol=bound, equal_nan=True)
    for name, weight in wanted[1].items():
        torch.testing.assert_close(weights[name], weight, rtol=bound, atol=bound)


@pytest.mark.parametrize("layout", in_turn(LAYOUTS, 2))
def test_all_ranks_skip_a_step_when_one_overflows(layout):
    world, strategy = LAYOUTS[layout]
    flags = {"gradient_clip_val": 0.5}
    wanted = run(_with_flags, None, 1, flags, world=1)[0]
    assert wanted[0][0] > wanted[0][1]
    assert max(wanted[0]) > wanted[0][1]
    for got in run(_with_flags, strategy, world, flags, world=world):
        _same(got, wanted)


def test_accumulation_unscales_once():
    flags = {"accumulate_grad_batches": 2}
    wanted = run(_with_flags, None, 1, flags, world=1)[0]
    for layout in ("pipeline", "zero3"):
        for got in run(_with_flags, LAYOUTS[layout][1], 2, flags, world=2):
            _same(got, wanted)


def _with_flags(strategy, world, flags):
    return _fit_scaled(strategy, world, **flags)


@pytest.mark.parametrize("layout", ["zero3", "pipeline"])
def test_the_loss_scale_resumes_from_and_into_one_device(tmp_path, layout):
    world, strategy = LAYOUTS[layout]
    whole = run(_fit_scaled, None, 1, world=1)[0]
    ours, stock = str(tmp_path / "ours.ckpt"), str(tmp_path / "stock.ckpt")
    run(_fit_scaled, strategy, world, ours, None, 1, world=world)
    run(_fit_scaled, None, 1, stock, None, 1, world=1)
    assert torch.load(ours)["MixedPrecision"] == torch.load(stock)["MixedPrecision"]
    (into_stock,) = run(_fit_scaled, None, 1, None, ours, world=1)
    assert into_stock[0] == whole[0][5:]
    for from_stock in run(_fit_scaled, strategy, world, None, stock, world=world):
        assert from_stock[0] == whole[0][5:]


def test_precision_is_checked_when_built():
    with pytest.raises(ConfigurationError, match="'8-true' is not supported"):
        Precision3D("8-true")
    with pytest.raises(ConfigurationError, match="does not scale the loss"):
        Precision3D("32-true", scaler=_scaler())


class Factored(torch.optim.Optimizer):
    """Keeps means of rows, as Adafactor does: states of another shape than their parameters."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                row = parameter.grad.square() + 1e-4
                row = row.mean(-1, keepdim=True) if row.ndim > 1 else row
                state = self.state[parameter]
                state["row"] = row if "row" not in state else state["row"] * 0.9 + row * 0.1
                parameter.add_(parameter.grad / state["row"].sqrt(), alpha=-group["lr"])
        return loss


class UsesFactored(MLP):
    def configure_optimizers(self):
        return Factored(self.parameters())


def _fit_factored(strategy, world):
    seed_everything(7, verbose=False)
    module = UsesFactored()
    kind = Precision3D if strategy is not None else MixedPrecision
    plugins = [kind("16-mixed", "cpu", _scaler())]
    make_trainer(world, strategy, max_epochs=1, limit_val_batches=0, plugins=plugins).fit(module)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_unscaling_leaves_states_alone():
    (wanted,) = run(_fit_factored, None, 1, world=1)
    for weights in run(_fit_factored, {"zero_stage": 1}, 2, world=2):
        for name, weight in wanted.items():
            torch.testing.assert_close(weights[name], weight, rtol=2e-2, atol=2e-3)


def test_the_record_of_overflows_is_where_the_ranks_communicate_from():
    """As with gradients offloaded to host memory: "meta" stands for a GPU, the record is on the CPU."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), _scaler()
    scaler.scale(parameter.sum()).backward()
    unscale(scaler, optimizer, torch.device("meta"))
    assert [record.device.type for record in scaler._found_inf_per_device(optimizer).values()] == ["meta"]
    torch.testing.assert_close(parameter.grad, torch.ones(2))


def test_autocast_is_for_the_device_of_the_strategy(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # a machine with GPUs; the Trainer is told to use none
    plugin, chosen = Precision3D("bf16-mixed"), Precision3D("bf16-mixed", "cuda")
    for each in (plugin, chosen):
        each.compute_on(torch.device("cpu"))
    assert (plugin.device, chosen.device) == ("cpu", "cuda")


@pytest.mark.parametrize(("precision", "scaler"), [("bf16-mixed", None), ("16-mixed", ("cpu", True))])
@on_ranks(1, group=False)
def test_the_strategy_tells_its_device(precision, scaler):
    """Lightning says "cuda" for each accelerator that is not a string."""
    strategy = Strategy3D()
    flags = {"accelerator": CPUAccelerator(), "devices": 1, "max_steps": 1, "limit_val_batches": 0}
    trainer = Trainer(**{**QUIET, **flags}, strategy=strategy, precision=precision)
    plugin, before = strategy.precision_plugin, strategy.precision_plugin.device
    plugin.device = "cuda"  # as where there are GPUs
    trainer.fit(MLP())
    made = plugin.scaler
    assert before == plugin.device == "cpu"
    assert (made and (made._device, made.is_enabled())) == scaler


def test_a_scaler_that_the_user_chose_stays():
    chosen = torch.amp.GradScaler("cpu", init_scale=4.0)
    for plugin in (Precision3D("16-mixed", scaler=chosen), convert(MixedPrecision("16-mixed", "cpu", chosen))):
        plugin.compute_on(torch.device("meta"))
        assert plugin.scaler is chosen
    off = Precision3D("16-mixed", scaler=torch.amp.GradScaler("cuda", enabled=False))
    off.compute_on(torch.device("cpu"))
    assert not off.scaler.is_enabled()


@pytest.mark.parametrize("stage", [long(1), 2])
def test_ties_find_gradients_that_accumulate_in_another_type(stage):
    trainer = {"max_epochs": 2, "accumulate_grad_batches": 2}
    attributes = {"optimizer": "plain_sgd"}
    wanted = reference("GPT", attributes, {**trainer, "precision": "bf16-mixed"})
    strategy = {"pipeline_parallel_size": 2, "zero_stage": stage, "precision_plugin": Precision3D("bf16-mixed", "cpu")}
    for got in run(train, "GPT", 4, strategy, attributes, trainer, world=4):
        torch.testing.assert_close(got["losses"], wanted["losses"], rtol=2e-2, atol=2e-2)
        change = got["weights"]["head.weight"] - wanted["before"]["head.weight"]
        expected = wanted["weights"]["head.weight"] - wanted["before"]["head.weight"]
        assert (change - expected).norm() < 0.04 * expected.norm()
        torch.testing.assert_close(got["weights"]["head.weight"], got["weights"]["embed.weight"], rtol=0, atol=0)
