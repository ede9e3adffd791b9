"""One batch through the whole module before it is placed: what each block is called with."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_3d.pipeline import seeds
from lightning_3d.pipeline.logs import LogTap, Record
from lightning_3d.pipeline.rehearse import as_before
from lightning_3d.tensor.record import Recording, record_calls
from lightning_3d.tensor.units import find_units

STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


def record_one_batch(trainer: Trainer, module: LightningModule, to_device: Callable[[Any], Any]) -> Recording | None:
    """Run the step that is about to run on its first batch, without gradients, and watch the blocks.

    Random streams, buffers and plain attributes are as before afterwards and nothing is logged. None where there is no
    block to split or the step cannot be run by itself; then inputs are made up.
    """
    if not find_units(module) or not module.automatic_optimization:
        return None
    assert trainer.state.fn is not None
    step = getattr(module, STEPS[trainer.state.fn])
    try:
        with seeds.set_aside(), as_before(module), LogTap(module).recording(Record()):
            batch = to_device(_first_batch(trainer))
            return record_calls(module, lambda: step(*_arguments(step, batch)))
    except Exception as error:
        warnings.warn(
            f"{STEPS[trainer.state.fn]} could not be run on one batch ahead of training"
            f" ({type(error).__name__}: {error}). What the blocks are called with is guessed from their sizes instead;"
            " blocks that take more than one tensor stay whole.",
            stacklevel=2,
        )
        return None


def _first_batch(trainer: Trainer) -> Any:
    """The first batch of the loop that is about to run, from an iterator of its own."""
    loop: Any = {
        TrainerFn.FITTING: trainer.fit_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }[trainer.state.fn]  # type: ignore[index]
    loop.setup_data()
    combined = loop._combined_loader
    try:
        batch, _, _ = next(iter(combined))
    finally:
        combined.reset()
        loop._data_fetcher = None  # one that is torn down again, after an error, looks for its iterator
        loop._combined_loader = None  # the loop sets its data up anew: its iterator draws what one device would draw
    return batch


def _arguments(step: Callable[..., Any], batch: Any) -> tuple[Any, ...]:
    """What Lightning would call `step` with: the batch, then indices as far as it takes them."""
    return (batch, 0, 0)[: len(inspect.signature(step).parameters)]
