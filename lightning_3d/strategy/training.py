"""Lightning's step hooks on a placed module."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.axes.group import Group, broadcast_tensors
from lightning_3d.errors import RunError, explain_shard_errors
from lightning_3d.faults import flight
from lightning_3d.launch import job_folder
from lightning_3d.layout import PIPELINE_AXIS
from lightning_3d.monitor.callback import Monitor3D, QuietMonitor
from lightning_3d.optim.grad_norm import counted_here, grad_norm
from lightning_3d.optim.state_bytes import states_per_parameter_byte
from lightning_3d.optim.states import StateBytes
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.parallel.parallel_plan import ParallelPlan
from lightning_3d.parallel.state_counts import expected_states, with_states
from lightning_3d.pipeline.pipeline import Pipeline
from lightning_3d.ranks import talk
from lightning_3d.sandbox.first_batch import loader_batch_size
from lightning_3d.strategy.banner import memory_line, opening, step_line
from lightning_3d.strategy.memory_report import MemoryReport, gradient_bytes, rank_memory
from lightning_3d.strategy.meter import Measured, StepMeter, write, write_failure
from lightning_3d.strategy.resume import Resuming
from lightning_3d.strategy.steps import CheckedSteps
from lightning_3d.zero import DataParallel

_FIRST_STEPS = 3
"""Optimizer steps whose gradients are counted. Lightning drops them at the end of an epoch."""


class Training(Resuming):
    """Runs training, validation, test and predict steps, backward and the optimizers' steps."""

    measured: Measured | None = None
    """Seconds of a step and memory of the last `fit`."""
    _expected: Sequence[StateBytes] = ()
    """Bytes of each pipeline rank, counted before the module is placed."""
    _reports_memory = False
    """True until the memory of the first epoch is printed."""
    _first_epoch = _first_step = 0
    """Of this `fit`."""
    _gradients = 0
    """The most bytes of gradients after an optimizer step."""
    _kept: float | None = None
    """Bytes of optimizer states for each byte of a trained parameter, None where they could not be counted."""
    _monitor: QuietMonitor | None = None
    """Of a run without a monitor of the user's."""
    _in_step = False
    _quiet = False

    def _moment(self) -> tuple[int, int] | None:
        trainer = self._module.trainer
        if self.layout.pipelined and (self._in_step or not trainer.training):
            return None
        return trainer.global_step, trainer.fit_loop.batch_idx

    @property
    def _applied(self) -> ParallelModule:
        assert self._parallel is not None, "the module is placed from setup on"
        return self._parallel

    @property
    def pipeline(self) -> Pipeline | None:
        """The stages of this rank, None without a pipeline."""
        return self._applied.pipeline

    @property
    def _placed_steps(self) -> CheckedSteps:
        assert self._steps is not None, "steps are prepared at the end of setup"
        return self._steps

    @property
    def _data(self) -> DataParallel:
        return self._parallel.data if self._parallel is not None else DataParallel()

    def training_step(self, *args: Any) -> Any:
        if self._steps is None:  # after a run the module is the user's own again
            return super().training_step(*args)
        trainer = self._module.trainer
        flight.at(f"training_step of batch {trainer.fit_loop.batch_idx}", trainer.global_step)
        self._in_step = True
        with explain_shard_errors(self.layout):
            output = self._steps.train(super().training_step, args)
        self._in_step = False
        if self._monitor is not None:
            self._monitor.step_ended(output)
        if not self._module.automatic_optimization:  # its backwards and optimizer steps have ended
            self._data.finish_forward()
            self._data.reshard()
        return output

    def validation_step(self, *args: Any) -> Any:
        flight.at("validation_step")
        return self._placed_steps.evaluate("validation_step", super().validation_step, args)

    def test_step(self, *args: Any) -> Any:
        flight.at("test_step")
        return self._placed_steps.evaluate("test_step", super().test_step, args)

    def predict_step(self, *args: Any) -> Any:
        flight.at("predict_step")
        return self._placed_steps.evaluate("predict_step", super().predict_step, args)

    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._steps is not None:  # else a trial run of `training_step` in setup
            self._steps.before_backward(closure_loss)

    @contextmanager
    def _around_backward(self) -> Generator[None, None, None]:
        with explain_shard_errors(self.layout):
            yield
        if self._steps is not None:
            self._steps.after_backward()

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        flight.at("optimizer_step", self._module.trainer.global_step)
        if self._in_step:  # manual optimization: the optimizer needs the shards, which have the gradients
            self._data.reshard()
        output = super().optimizer_step(optimizer, self._timed(closure, optimizer), model, **kwargs)
        self._data.reshard()
        if self._module.trainer.global_step < self._first_step + _FIRST_STEPS:
            self._gradients = max(self._gradients, gradient_bytes(self._module))
        if self._in_step:  # the rest of the user's step uses the new parameters
            self._data.gather()
        return output

    def _timed(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        """Let the monitor know that the gradients are there, where Lightning lets callbacks know."""

        def computed() -> Any:
            output = closure()
            self._ask_monitor("on_before_optimizer_step", optimizer)
            return output

        return closure if self._monitor is None else computed

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients, equal to that of one device. Call it on every rank, while `.grad` is complete.

        That is in `on_before_optimizer_step` or `configure_gradient_clipping`, before or after clipping.
        """
        return self._norm_of(self._module.parameters(), norm_type)

    def _norm_of(self, parameters: Iterable[nn.Parameter], norm_type: float) -> Tensor:
        layout, place = self.layout, self.coordinate  # they are computed on use: once, not for each parameter
        shard = layout.shard_size

        def counted(parameter: nn.Parameter) -> bool:
            return counted_here(parameter, place, shard) and self._applied.parameters.counts(parameter)

        return grad_norm(parameters, counted, norm_type, self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self._placed_steps.window.accumulating():
            yield

    def _announce(self, plan: ParallelPlan | None, fitting: bool) -> None:
        if not fitting or plan is None:
            return
        if plan.split is not None:
            line = plan.split.warning(self.layout.sizes[PIPELINE_AXIS], self.layout.schedule)
            if line is not None:
                rank_zero_warn(line)
        if plan.context is not None and plan.context.warning is not None:
            rank_zero_warn(plan.context.warning)
        self._expected = expected_states(self._module, self.layout, plan.split, plan.tensor)
        if not self._quiet:
            context = "" if plan.context is None else plan.context.line
            rank_zero_info(opening(self._module, self.layout, plan.split, plan.tensor, context, plan.scope.line))

    @property
    def recomputes(self) -> bool:
        """True where backward computes activations of blocks again."""
        recomputed = self._applied.recomputed
        return recomputed is not None and recomputed.choice.mode is not None

    def _add_monitor(self, trainer: Any) -> None:
        """Watch the training, unless the user's own monitor does or the run is to be quiet.

        The strategy calls the monitor: the Trainer's list of callbacks is the user's, who may read, copy and index it.
        """
        if not self._quiet and not any(isinstance(each, Monitor3D) for each in trainer.callbacks):
            self._undo.set(self, "_monitor", QuietMonitor())

    def _ask_monitor(self, hook: str, *args: Any) -> None:
        if self._monitor is not None:
            getattr(self._monitor, hook)(self._module.trainer, self._module, *args)

    def _count_states(self) -> None:
        """Count the optimizers' states, before hooks of the user may count steps: a copy of each optimizer steps."""
        self._kept = states_per_parameter_byte(self.optimizers)

    def on_train_start(self) -> None:
        super().on_train_start()
        self._meter = StepMeter(self.root_device)
        self._reports_memory = not self._quiet
        self._first_epoch = self._module.trainer.current_epoch
        self._first_step, self._gradients = self._module.trainer.global_step, 0
        if not self._quiet:
            trainer = self._module.trainer
            if self.global_rank == 0:
                rank_zero_info(memory_line(self._expected, self.optimizers, self._kept))
            rank_zero_info(step_line(self.layout, trainer.accumulate_grad_batches, loader_batch_size(trainer)))
        self._ask_monitor("on_train_start")

    def memory_report(self) -> MemoryReport:
        """The memory of every rank during `fit`. Call it on every rank, between steps."""
        if self._steps is None or self._module.trainer.state.fn != TrainerFn.FITTING:
            raise RunError(
                "memory_report() was called outside of fit, where ranks have no gradients and no steps. Call it in a"
                " hook or a callback, for example in on_train_epoch_end."
            )
        self._data.reshard()
        planned = with_states(self._expected, self._kept or 0.0)[self.coordinate[PIPELINE_AXIS]]
        disk = self._applied.disk
        on_disk = disk.has if disk is not None else lambda tensor: False
        mine = rank_memory(self._module, self.optimizers, self._gradients, planned, self.root_device, on_disk)
        return MemoryReport(tuple(talk.gather(mine)))

    def _after_first_epoch(self) -> None:
        """Print the memory of the fullest rank, once."""
        if self._reports_memory:
            self._reports_memory = False
            rank_zero_info(self.memory_report().line)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._meter.batch()
        if self._module.trainer.current_epoch > self._first_epoch:
            self._after_first_epoch()
        self._ask_monitor("on_train_batch_start", batch, batch_idx)

    def on_train_end(self) -> None:
        self._ask_monitor("on_train_end")
        self._after_first_epoch()
        trainer = self._module.trainer
        self.measured = self._meter.end(trainer.accumulate_grad_batches)
        folder = job_folder()
        if folder is not None and self.global_rank == 0:
            write(folder, self.measured, self.layout, trainer.callback_metrics, self.root_device)

    def on_exception(self, exception: BaseException) -> None:
        self._ask_monitor("on_exception", exception)
        folder = job_folder()
        if folder is not None:
            write_failure(folder, self.global_rank, exception)
        super().on_exception(exception)

    def on_validation_end(self) -> None:
        self._data.reshard()
        self._ask_monitor("on_validation_end")
        if self._preemption is not None:
            self._preemption.after_validation()

    def on_test_end(self) -> None:
        self._data.reshard()

    on_predict_end = on_test_end

    def on_validation_start(self) -> None:
        self._ask_monitor("on_validation_start")
        self._placed_steps.evaluations += 1
        self._share_buffers()

    on_test_start = on_predict_start = on_validation_start

    def _share_buffers(self) -> None:
        """Evaluate with the buffers (batch-norm statistics, say) of the first data rank, as DDP does."""
        if self.layout.data_parallel_size > 1:
            buffers = [buffer for buffer in self._module.buffers() if not buffer.is_meta]
            broadcast_tensors(buffers, Group(self.data_group))
