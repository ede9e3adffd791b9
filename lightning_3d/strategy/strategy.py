"""`Strategy3D`: Lightning's hooks in order. The packages that they call do the work."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.activations.recompute_blocks import Recompute, RecomputeArgument
from lightning_3d.checkpoint import CheckpointFormat, Splits, load_optimizer, load_weights
from lightning_3d.comm.grad_sync import GradCompression, GradSync
from lightning_3d.data.position import counted
from lightning_3d.data.same_samples import refuse_other_shares, seed_workers_by_data_rank
from lightning_3d.errors import RunError, explain_shard_errors
from lightning_3d.extensions import load
from lightning_3d.faults import flight
from lightning_3d.launch import job_folder
from lightning_3d.launch.lightning_private import trainer_of
from lightning_3d.layout import CONTEXT_AXIS, DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS, Layout, Schedule, ZeroStage
from lightning_3d.module.host_memory import quick_collections, return_freed_memory
from lightning_3d.module.undo import UndoStack
from lightning_3d.offload.offload_choice import Offload, OffloadArgument
from lightning_3d.optim.step import move_states
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.parallel.parallel_plan import UserChoices
from lightning_3d.pipeline.observe_batch import LossScope
from lightning_3d.pipeline.pipeline import Pipeline
from lightning_3d.strategy.checkpoints import Saved
from lightning_3d.strategy.fit_report import Measured, MemoryReport, write_failure
from lightning_3d.strategy.in_shards import Teardown, first_shard, shards_of
from lightning_3d.strategy.placing import check_batches, choose_samplers, close_axes, share_buffers
from lightning_3d.strategy.processes import Processes
from lightning_3d.strategy.registry import NAMES, refuse_mistakes
from lightning_3d.strategy.set_up import norm_of, prepare_optimizers, set_up
from lightning_3d.strategy.settings import Resume, Settings, StartMethod
from lightning_3d.strategy.weights_in_step import evaluating, in_step
from lightning_3d.verify.first_step import Verify


class Strategy3D(Processes):
    """Train an unchanged LightningModule with data, tensor and pipeline parallelism and ZeRO.

    Args:
        layout: "auto" lets the planner choose the sizes and the ZeRO stage for the module, its first batch and the
            devices, and explain the choice. Sizes and a stage that you also give are kept.
        data_parallel_size: ranks that work on different data; "auto" uses all ranks that the other axes leave.
        tensor_parallel_size: ranks that share every large matrix; 1 if not given.
        pipeline_parallel_size: ranks that own different blocks; 1 if not given.
        context_parallel_size: ranks that see the same samples, and share each long sequence inside of the blocks.
        expert_parallel_size: data and context ranks that share the experts of each block. Tokens travel to their
            experts and back. It divides the number of these ranks, and that of the experts.
        zero_stage: what data ranks shard: 0 nothing, 1 (default) optimizer states, 2 also gradients, 3 also parameters.
        zero_shard_size: shard over so many data ranks only and replicate between such groups (hybrid shard).
        schedule: order of forwards and backwards in the pipeline.
        stages_per_rank: virtual stages of each pipeline rank, for the interleaved, `loopedbfs` and V schedules.
        num_microbatches: microbatches of one batch in the pipeline; "auto" chooses by the batch size.
        pipeline_split: names of the first block of each stage but the first, instead of a balanced cut.
        loss_scope: "microbatch" computes the loss of each microbatch, "batch" once on the full batch, for losses that
            are no mean over samples; "auto" is "microbatch" where the first batch shows a mean.
        sequence_parallel: also shard norms and dropout along the sequence, over the tensor ranks.
        tensor_plan: module or parameter names (patterns) -> "column", "row", "column:3" or "whole"; overrides
            the inferred plan, and is proven like it.
        grad_sync: how gradients are averaged: "ring" is ours, "native" the backend's, "hierarchical" a ring inside each
            node and then between nodes; "auto" is the ring on gloo and the backend's own on NCCL.
        grad_compression: send gradients as "bf16", "fp16", "int8" or "powersgd", with error feedback.
        offload: what is outside of the device while nothing uses it: {"optimizer": ..., "parameters": ...,
            "activations": ...}, each "cpu" for host memory; the first two also "nvme:/folder" for a local disk. "all"
            keeps parameters, gradients and optimizer states of a sharded stage in host memory.
        offload_budget: memory of a rank for what is on its way from or to a disk: "0.5GB", or a number of bytes;
            "1GB" if not given.
        recompute: activations that backward computes again, block by block. "full" keeps only what enters a block;
            "selective" also results of products, attention and collectives; "auto" is full for as few blocks as
            `recompute_budget` allows.
        recompute_budget: for "auto", the memory of a rank for activations: "20GB", or a number of bytes.
        checkpoint_format: "full" is Lightning's own single file; "sharded" a directory to which every rank writes its
            shards and from which any layout loads; "auto" is "full" while the training state fits in a gigabyte.
        async_checkpoint: save a copy of the state in the background; training waits for the copy only. One save runs
            at a time. The next save raises the error of the last one; the end of training waits for the last save.
        resume: "auto" resumes from the newest undamaged checkpoint of this run if `fit` is given no `ckpt_path`, also
            on another number of ranks, with the same global batch.
        teardown: "whole" makes the module whole on every rank at the end of a run. "sharded" leaves each rank its
            shards, with which the next run of the same settings goes on. "auto" is "whole" while weights and optimizer
            states of all ranks of a host, whole, fit in half of its memory, and those of a rank in half of its GPU's.
        quiet: print no overview at the start of `fit` and no line about speed at its end, and add no monitor.
        verify: "first_step" also computes the first gradients with the unsplit module, which takes its memory, and
            compares them; "replicas" compares copies of parameters every 25 batches. Both raise a DivergenceError.
        dry_run: a cluster ("128x8xh100", "8xcpu", or a number of ranks). `fit` then trains nothing. It reports, from
            shapes only, the memory and the messages of ranks of that cluster, and errors that would occur.
        timeout: time after which a rank stops waiting for another, as a `timedelta` or in seconds. At the start it is
            at least five minutes.
        start_method: start of processes without a launcher; "popen" runs your script again. "auto" does so if there is
            a script, and forks in a notebook or at a prompt.
        process_group_backend: "gloo", "nccl" ...; chosen by the device if not given.
    """

    strategy_name = "3d"
    measured: Measured | None = None
    """Seconds of a step and memory of the last `fit`."""
    layout_class = Layout
    """The sizes. A subclass with one more axis replaces it."""

    def __init__(
        self,
        *,
        layout: Literal["given", "auto"] = "given",
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        zero_stage: ZeroStage | None = None,
        zero_shard_size: int | None = None,
        schedule: Schedule = "1f1b",
        stages_per_rank: int = 1,
        num_microbatches: int | Literal["auto"] = "auto",
        pipeline_split: list[str] | None = None,
        loss_scope: LossScope = "auto",
        sequence_parallel: bool = False,
        tensor_plan: dict[str, str] | None = None,
        grad_sync: GradSync | Literal["auto"] = "auto",
        grad_compression: GradCompression | None = None,
        offload: OffloadArgument = "none",
        offload_budget: str | float | None = None,
        recompute: RecomputeArgument | None = None,
        recompute_budget: str | float | None = None,
        checkpoint_format: CheckpointFormat = "auto",
        async_checkpoint: bool = False,
        resume: Resume | None = None,
        teardown: Teardown = "auto",
        quiet: bool = False,
        verify: Verify | None = None,
        dry_run: str | int | None = None,
        timeout: timedelta | float = 1800.0,
        start_method: StartMethod = "auto",
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        choices = UserChoices(
            pipeline_split=pipeline_split, loss_scope=loss_scope, tensor_plan=tensor_plan,
            recompute=Recompute.of(recompute, recompute_budget), offload=Offload.of(offload, offload_budget),
        )  # fmt: skip
        sizes = {
            DATA_AXIS: data_parallel_size, CONTEXT_AXIS: context_parallel_size, TENSOR_AXIS: tensor_parallel_size,
            PIPELINE_AXIS: pipeline_parallel_size,
        }  # fmt: skip
        settings = Settings(
            layout=layout, layout_class=self.layout_class, sizes=sizes,
            expert_parallel_size=expert_parallel_size, zero_stage=zero_stage,
            zero_shard_size=zero_shard_size, schedule=schedule, stages_per_rank=stages_per_rank,
            num_microbatches=num_microbatches, sequence_parallel=sequence_parallel, choices=choices,
            grad_sync=grad_sync, grad_compression=grad_compression, checkpoint_format=checkpoint_format,
            async_checkpoint=async_checkpoint, resume=resume, teardown=teardown, quiet=quiet, verify=verify,
            timeout=timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout),
            start_method=start_method, process_group_backend=process_group_backend,
        )  # fmt: skip
        auto = load("layout chooser")(settings.base, **settings.given) if layout == "auto" else None
        super().__init__(
            settings, auto, accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        )
        if dry_run is not None:
            self._dry_run = load("dry run")(self, str(dry_run))

    # ---- describe -> place -> apply ------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Check the module, place it, plan and apply the parallelisms, prepare the steps."""
        with quick_collections(after_one=self._current.follows_another):
            set_up(self, self._current)
        return_freed_memory()

    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        prepare_optimizers(self._current, self.optimizers, self.reduce)

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        self.precision_plugin.around_backward = self._around_backward

    # ---- steps ---------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any) -> Any:
        run = self.run
        if run is None or run.steps is None:  # after a run the module is the user's own again
            return super().training_step(*args)
        flight.at(f"training_step of batch {run.trainer.fit_loop.batch_idx}", run.trainer.global_step)
        with in_step(run):
            output = run.steps.train(super().training_step, args)
        run.reporting.end_step(output)
        if not run.module.automatic_optimization:  # its backwards and optimizer steps have ended
            run.data.check_gradients()  # of a step of the optimizer itself (`optimizers(use_pl_optimizer=False)`)
            run.data.finish_forward()
            run.data.reshard()
        return output

    def validation_step(self, *args: Any) -> Any:
        return self._evaluate("validation_step", super().validation_step, args)

    def test_step(self, *args: Any) -> Any:
        return self._evaluate("test_step", super().test_step, args)

    def predict_step(self, *args: Any) -> Any:
        return self._evaluate("predict_step", super().predict_step, args)

    def _evaluate(self, name: str, call: Callable[..., Any], args: Any) -> Any:
        flight.at(name)
        with evaluating(self._current, name):
            return self._current.running.evaluate(name, call, args)

    def pre_backward(self, closure_loss: Tensor) -> None:
        if self.run is not None and self.run.steps is not None:  # else a trial run of `training_step` in setup
            self.run.steps.before_backward(closure_loss)

    @contextmanager
    def _around_backward(self, loss: Tensor, inputs: Any) -> Generator[None, None, None]:
        with explain_shard_errors(self.layout):
            if self.run is not None:
                self.run.data.check_backward(loss, inputs if isinstance(inputs, Sequence) else [inputs])
            yield
        if self.run is not None and self.run.steps is not None:
            self.run.steps.after_backward()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self._current.running.window.accumulating():
            yield

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        run = self._current.stepping(optimizer)
        flight.at("optimizer_step", run.trainer.global_step)
        within, run.step = run.step, ""
        if within:  # manual optimization: the optimizer needs the shards, which have the gradients
            run.data.check_gradients()
            run.data.reshard()
        output = super().optimizer_step(optimizer, run.reporting.timed(closure, optimizer), model, **kwargs)
        run.data.reshard()
        run.reporting.count_gradients()
        run.step = within
        if within:  # the rest of the user's step uses the new parameters
            run.data.gather()
        return output

    # ---- what users ask ------------------------------------------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline | None:
        """The stages of this rank, None without a pipeline."""
        return self._current.placed.pipeline

    @property
    def recomputes(self) -> bool:
        """True where backward computes activations of blocks again."""
        recomputed = self._current.placed.recomputed
        return recomputed is not None and recomputed.choice.mode is not None

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients, equal to that of one device. Call it on every rank, while `.grad` is complete.

        That is in `on_before_optimizer_step` or `configure_gradient_clipping`, before or after clipping.
        """
        return norm_of(self._current, self._module.parameters(), norm_type)

    def memory_report(self) -> MemoryReport:
        """The memory of every rank during `fit`. Call it on every rank, between steps."""
        if self.run is None or self.run.steps is None or self.run.report is None:
            raise RunError(
                "memory_report() was called outside of fit, where ranks have no gradients and no steps. Call it in a"
                " hook or a callback, for example in on_train_epoch_end."
            )
        return self.run.report.memory()

    # ---- moments of a run ----------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        refuse_other_shares(dataloader, self.layout.data_parallel_size, self.data_parallel_rank)
        seed_workers_by_data_rank(dataloader, self.data_parallel_rank)
        return counted(dataloader) if self._module.trainer.training else dataloader

    def on_train_start(self) -> None:
        self.checkpoints.resume(self._current)
        self._current.reporting.begin()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._current.reporting.begin_batch(batch, batch_idx)

    def on_train_end(self) -> None:
        self.measured = self._current.reporting.end()

    def on_validation_start(self) -> None:
        self._ask_monitor("on_validation_start")
        self.on_test_start()

    def on_test_start(self) -> None:
        check_batches(self._current)
        self._current.running.evaluations += 1
        share_buffers(self._current)

    on_predict_start = on_test_start

    def on_validation_end(self) -> None:
        run = self._current
        run.data.reshard()
        self._ask_monitor("on_validation_end")
        if run.preemption is not None:
            run.preemption.after_validation()

    def on_test_end(self) -> None:
        self._current.data.reshard()

    on_predict_end = on_test_end

    def _ask_monitor(self, hook: str, *args: Any) -> None:
        if self.run is not None and self.run.report is not None:
            self.run.report.ask_monitor(hook, *args)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    @property
    def _parallel(self) -> ParallelModule | None:
        """The divided module, also between two runs where it stays in shards."""
        if self.run is not None:
            return self.run.parallel
        in_shards = shards_of(self._module)
        return None if in_shards is None else in_shards.parallel

    @property
    def _splits(self) -> Splits:
        return self._parallel.parameters.split if self._parallel is not None else lambda _: None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._parallel is not None:
            self._parallel.data.reshard()
        with self.as_saved():
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self.as_saved():
            return super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        alone, forked = self.world_size == 1, bool(getattr(self.launcher, "procs", ()))
        state = Saved(self._module, self.optimizers, self._splits, self.checkpoint_io, self.run, alone, forked)
        self.checkpoints.save(checkpoint, filepath, storage_options, state)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        flight.at(f"loading {checkpoint_path}")
        loaded = self.checkpoints.keeper.load(checkpoint_path, weights_only, self.checkpoint_io)
        trainer: Any = trainer_of(self.lightning_module)  # none before a run
        callbacks = trainer.callbacks if trainer is not None else []
        self.checkpoints.take(loaded, self.layout, self.coordinate, callbacks)
        if self.run is not None:
            self.run.shares_order = self.checkpoints.found.shares_order
            if self.run.layout is not None:
                choose_samplers(self.run)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._parallel is not None:
            self._parallel.data.reshard()
        self.take_built()  # none keeps its first value
        whole = self._parallel is None and self._divides
        if whole:
            self.precision_plugin.convert_module(self._module)  # before there are values to convert
        load_weights(self._module, checkpoint["state_dict"], strict, self.root_device if whole else None)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for index, (optimizer, stored) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=True)):
            load_optimizer(optimizer, stored, self._module, self._splits, f"the state of optimizer {index}")
            move_states([optimizer], self.root_device, self.settings.offloads_states)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self.checkpoints.keeper.remove(filepath, self.checkpoint_io)

    # ---- end -----------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        self._ask_monitor("on_exception", exception)
        if (folder := job_folder()) is not None:
            write_failure(folder, self.global_rank, exception)
        self.checkpoints.wait()
        self.failure.end(exception, self.lightning_module)
        if self.failure.alone:
            self.checkpoints.keeper.forget()

    def teardown(self) -> None:
        """Undo what the run changed. The module is then plain and whole on every rank, or each has its shards."""
        if self.run is not None:
            self.optimizers = self.optimizers if self.run.steps else []  # set-up failed: states may be on meta
            self.checkpoints.end_run(self.run)
            self.run.close()
        with UndoStack() as undo:
            if shards_of(self._module) is not None or first_shard(self._module) is not None:
                undo.set(self._module, "cpu", lambda: self._module)  # shards stay where the next run uses them
            if self.run is not None:
                self._last_mesh = None if self.run.opened is None else self.run.mesh
                close_axes(self.run)
            if not self.failure.alone:  # else the module stays sharded, and cannot be moved to the CPU
                self.failure.close()
                super().teardown()
            self.run = None
            self.checkpoints.keeper.close()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make `Trainer(strategy="3d_zero1")` and its like work; called when the package is imported."""
        for name, description, arguments in NAMES:
            strategy_registry.register(name, cls, description=description, override=True, **arguments)
        refuse_mistakes(strategy_registry)
