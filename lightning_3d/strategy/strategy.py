"""`Strategy3D`: Lightning's hooks in order. The packages that they call do the work."""

from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lightning_3d.activations.fit_budget import BudgetFit
from lightning_3d.activations.recompute_choice import Recompute, RecomputeArgument
from lightning_3d.checkpoint import CheckpointFormat
from lightning_3d.comm.config import CommConfig, GradCompression, GradSync
from lightning_3d.data.remade_loader_private import check_remade_loaders
from lightning_3d.data.same_samples import SampleCheck
from lightning_3d.errors import ConfigurationError
from lightning_3d.extensions import LayoutChooser, load
from lightning_3d.faults import flight
from lightning_3d.layout import PIPELINE_AXIS, Layout, Schedule, ZeroStage
from lightning_3d.module.host_memory import quick_collections, return_freed_memory
from lightning_3d.module.metrics import gather_over
from lightning_3d.module.state_dict import full_module_state, full_optimizer_state, swap_parameters
from lightning_3d.module.undo import UndoStack
from lightning_3d.offload.offload_choice import Offload, OffloadArgument
from lightning_3d.optim.grad_norm import clip_like_one_device
from lightning_3d.optim.step import check_state, move_states, refuse_new_parameters, step_like_one_device
from lightning_3d.optim.step_from_disk import offload_states
from lightning_3d.parallel import parallel_plan
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.parallel.parallel_plan import UserChoices
from lightning_3d.parallelize import parallelize
from lightning_3d.pipeline.loss_scope import LossScope
from lightning_3d.pipeline.unsupported import check_automatic, check_supported
from lightning_3d.ranks import talk
from lightning_3d.ranks.random_streams import StepRandom
from lightning_3d.sandbox.deferred import computed_on_use
from lightning_3d.strategy.checks import (
    check_callbacks,
    check_compiled,
    check_hooks,
    check_module,
    check_reports,
    check_same_module,
    evaluate_with_no_grad,
    finetune_by_identity,
)
from lightning_3d.strategy.in_shards import (
    Teardown,
    check_teardown,
    check_whole,
    first_shard,
    shards_of,
)
from lightning_3d.strategy.placing import Placing
from lightning_3d.strategy.processes import StartMethod
from lightning_3d.strategy.registry import NAMES, refuse_mistakes
from lightning_3d.strategy.resume import Resume
from lightning_3d.strategy.step_checks import (
    ActivationsFit,
    FirstStepAgrees,
    LossesAgree,
    ReplicasAgree,
    SamplesAgree,
    StepCheck,
)
from lightning_3d.strategy.steps import CheckedSteps, make_runner
from lightning_3d.strategy.window import Window
from lightning_3d.usercode.averages_private import shard_averages
from lightning_3d.usercode.hooks import wrap_hooks
from lightning_3d.usercode.profiler_private import without_module_ranges
from lightning_3d.verify.first_step import FirstStep, Verify
from lightning_3d.verify.replicas import ReplicaCheck


class Strategy3D(Placing):
    """Train an unchanged LightningModule with data, tensor and pipeline parallelism and ZeRO.

    Args:
        layout: "auto" lets the planner choose the three sizes and the ZeRO stage for the module, its first batch and
            the devices, and explain the choice. Sizes and a stage that you also give are kept.
        data_parallel_size: ranks that work on different data; "auto" uses all ranks that the other axes leave.
        tensor_parallel_size: ranks that share every large matrix; 1 if not given.
        pipeline_parallel_size: ranks that own different blocks; 1 if not given.
        context_parallel_size: ranks that see the same samples, and share each long sequence inside of the blocks.
        zero_stage: states that data ranks shard: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters;
            1 if not given.
        zero_shard_size: shard over so many data ranks only and replicate between such groups (hybrid shard).
        schedule: order of forwards and backwards in the pipeline.
        stages_per_rank: virtual stages of each pipeline rank, for the interleaved and V schedules.
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
        super().__init__(
            resume=resume, checkpoint_format=checkpoint_format, async_checkpoint=async_checkpoint, timeout=timeout,
            start_method=start_method, process_group_backend=process_group_backend, accelerator=accelerator,
            parallel_devices=parallel_devices, cluster_environment=cluster_environment, checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )  # fmt: skip
        self._offload = Offload.of(offload, offload_budget)
        again = Recompute.of(recompute, recompute_budget)
        self._wanted = self.layout_class(
            data_parallel_size=1 if data_parallel_size == "auto" else data_parallel_size,
            tensor_parallel_size=1 if tensor_parallel_size is None else tensor_parallel_size,
            pipeline_parallel_size=1 if pipeline_parallel_size is None else pipeline_parallel_size,
            context_parallel_size=context_parallel_size,
            zero_stage=1 if zero_stage is None else zero_stage,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            num_microbatches=num_microbatches,
            sequence_parallel=sequence_parallel,
            recompute="full" if again.mode == "auto" else again.mode or "none",
            offload="none" if self._offload.parameters is None else "all",
        )
        self._choices = UserChoices(
            pipeline_split=pipeline_split, loss_scope=loss_scope, tensor_plan=tensor_plan, recompute=again,
            offload=self._offload,
        )  # fmt: skip
        if verify not in (None, "first_step", "replicas"):
            raise ConfigurationError(f"verify={verify!r} is none of None, 'first_step', 'replicas'.")
        self._verify = verify
        data = None if data_parallel_size == "auto" else data_parallel_size
        if layout not in ("given", "auto"):
            raise ConfigurationError(f"layout={layout!r} is none of 'given', 'auto'.")
        self._auto: LayoutChooser | None = None
        if layout == "auto":
            self._auto = load("layout chooser")(
                self._wanted, data=data, tensor=tensor_parallel_size, pipeline=pipeline_parallel_size, zero=zero_stage,
                shard=zero_shard_size, compression=grad_compression, offload=self._offload.alone,
            )  # fmt: skip
        self._chooses = self._auto is not None
        self._data_parallel_size = data_parallel_size
        self._zero_shard_size = zero_shard_size
        self._grad_sync: GradSync | Literal["auto"] = grad_sync
        self._grad_compression = grad_compression
        CommConfig(grad_sync="ring" if grad_sync == "auto" else grad_sync, grad_compression=grad_compression)
        self._quiet = quiet
        check_teardown(teardown)
        self._teardown: Teardown = teardown
        if dry_run is not None:
            self._dry_run = load("dry run")(self, str(dry_run))

    @property
    def layout(self) -> Layout:
        """The layout for the present number of processes."""
        layout = self._refitted or self._wanted
        if self._auto is not None:
            layout = self._auto.layout(self.world_size)
        elif self._data_parallel_size == "auto":
            layout = layout.fit(self.world_size)
        layout.check_world(self.world_size)
        self._offload.check(layout)
        return replace(layout, zero_shard_size=self._zero_shard_size)

    def _comm_config(self) -> CommConfig:
        auto: GradSync = "native" if self._streams else "ring"
        if self._streams and self._grad_sync in ("ring", "hierarchical"):
            rank_zero_warn(
                f'grad_sync="{self._grad_sync}" sends hop by hop on a GPU, and each hop is a launch that the next one'
                ' waits for. It is made for CPUs. grad_sync="auto" uses the collectives of NCCL, which overlap.'
            )
        return CommConfig(
            grad_sync=auto if self._grad_sync == "auto" else self._grad_sync,
            grad_compression=self._grad_compression,
            ranks_per_node=self.ranks_per_node // (self.layout.tensor_parallel_size) or 1,
        )

    # ---- describe -> place -> apply ------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Check the module, place it, plan and apply the parallelisms, prepare the steps."""
        with quick_collections(after_one=self._ran_before):
            self._set_up(trainer)
        return_freed_memory()

    def _set_up(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        flight.at("placing the module")
        self.accelerator.setup(trainer)
        module, plugin, fitting = self._module, self.precision_plugin, trainer.state.fn == TrainerFn.FITTING
        self._watch_run(trainer)
        self._check_module(fitting)
        self._choose_layout(trainer)
        self._check_user_code(trainer, fitting)
        self._adapt_user_code(trainer, fitting)
        self._stays_in_shards = self._keeps_shards(trainer)
        first = None
        if self._in_shards is None:
            parallel = ParallelModule(module)
            self._undo.callback(self._leave_module, parallel)
            self._place_unsplit(parallel, fitting)
            with self._without_module_ranges(trainer):
                first = FirstStep(module, plugin.forward_context) if self._verifies_first(fitting) else None
                self._plan = plan = parallel_plan.make_plan(
                    trainer, module, self.layout, self.mesh, self._choices, self._to_device, plugin
                )
            self._announce(plan, fitting)
            self._parallel, keeps = parallel, fitting or self._stays_in_shards  # a later run may train with shards
            parallelize(
                parallel, plan, self.layout, self.mesh, self.data_axis, plugin, self.root_device, training=keeps
            )
            self._save_full_tensors(trainer, parallel)
        else:
            self._reuse_shards(self._in_shards)
            self._announce(self._plan, fitting)
        if fitting:
            self._add_monitor(trainer)
            self._load_callbacks()
            self.setup_optimizers(trainer)
            self._undo.callback(clip_like_one_device(module, self._norm_of))
            move_states(self.optimizers, self.root_device, self._offload.optimizer is not None)
            self._count_states()
        self.setup_precision_plugin()
        self._prepare_steps(trainer, first)

    def _check_module(self, fitting: bool) -> None:
        check_same_module(self._module)
        check_module(self._module, fitting)
        if self._in_shards is None:
            check_whole(self._module)

    def _choose_layout(self, trainer: Trainer) -> None:
        if self._auto is not None and self._in_shards is None:
            with self._users_alone(), computed_on_use(self._module), self._without_module_ranges(trainer):
                self._auto.choose(trainer, self._module, self, self._to_device)
            self._open_axes()

    def _without_module_ranges(self, trainer: Trainer) -> AbstractContextManager[None]:
        return without_module_ranges(trainer.profiler)  # type: ignore[attr-defined]

    def _check_user_code(self, trainer: Trainer, fitting: bool) -> None:
        """Refuse what cannot work in this layout."""
        check_compiled(self._module, self.layout)
        if not fitting:
            return
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        if self._in_shards is None:  # else our own hooks are there too
            check_hooks(self._module, self.layout)
        if self.layout.pipelined:
            check_automatic(self._module)  # first: later checks assume automatic optimization
        check_callbacks(callbacks, self._module, self.layout)
        check_reports(callbacks, self._keeper.asynchronous)

    def _adapt_user_code(self, trainer: Trainer, fitting: bool) -> None:
        """Let the user's hooks, metrics and Lightning's callbacks work on shards, until the end of the run."""
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        if fitting:
            finetune_by_identity(self._undo)
        wrap_hooks(self._module, callbacks, lambda: self._parallel, lambda: self._data, self._undo)
        evaluate_with_no_grad(trainer, self._undo)
        check_remade_loaders(trainer, self._undo)
        self._undo.callback(gather_over(self.data_group, self.layout))

    def _save_full_tensors(self, trainer: Trainer, parallel: ParallelModule) -> None:
        """Let the module's state dict, and averages of weights in callbacks, give full tensors when saved."""
        full_module_state(self._module, parallel.parameters, talk.meet, parallel.changes)
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        shard_averages(callbacks, parallel, self._as_saved)

    def _prepare_steps(self, trainer: Trainer, first: FirstStep | None) -> None:
        parallel, plugin, device = self._applied, self.precision_plugin, self.root_device
        random = StepRandom(self.layout, self.coordinate)
        window = Window(trainer, self._module, parallel.data)
        runner = make_runner(parallel, random, window, plugin, self._undo)
        checks: list[StepCheck] = [
            SamplesAgree(SampleCheck(self.layout, self.coordinate, self.mesh, device), trainer),
            LossesAgree(self.layout, self.coordinate, self._module, plugin),
        ]
        if self._verify == "replicas":
            checks.append(ReplicasAgree(ReplicaCheck(parallel, self.layout, device)))
        if parallel.recomputed is not None and parallel.recomputed.choice.mode == "auto":
            checks.append(ActivationsFit(BudgetFit(parallel.recomputed, self._module, self.coordinate[PIPELINE_AXIS])))
        if first is not None:
            checks.append(FirstStepAgrees(first, parallel, self.data_group, random, window, plugin))
        self._steps = CheckedSteps(runner, checks, window, random)
        self._undo.callback(self._steps.close)

    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        parallel, place = self._applied, self._offload.optimizer
        table = parallel.parameters
        parallel.fitted.close()
        if parallel.stages is not None:
            check_supported(self._module, self.optimizers)
        swap_parameters(self.optimizers, table.swaps())  # an optimizer built earlier still has the originals
        for optimizer in self.optimizers:
            if self.layout.holds_parts:
                check_state(optimizer)
            for absent in [parameter for parameter in optimizer.state if parameter.is_meta]:
                del optimizer.state[absent]  # some fill their state when they are built (Adagrad)
            stepping = step_like_one_device(
                optimizer, table.full, table.shard, self.reduce,
                pipelined=parallel.stages is not None, host=place is not None,
            )  # fmt: skip
            self._undo.callback(stepping)
            offload_states(optimizer, place, parallel.disk, table.disk, self._undo)
            self._undo.callback(refuse_new_parameters(optimizer, self._module, self.layout))
            full_optimizer_state(optimizer, table, talk.meet, parallel.fitted)

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        self.precision_plugin.around_backward = self._around_backward

    # ---- end -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Undo what the run changed. The module is then plain and whole on every rank, or each has its shards."""
        if not self._failed and self._steps is not None:
            self._end_of_run()
        self._undo.close()
        self._steps = self._plan = None
        with UndoStack() as undo:
            shards = shards_of(self._module)
            self._parallel = None if shards is None else shards.parallel
            if shards is not None or first_shard(self._module) is not None:
                undo.set(self._module, "cpu", lambda: self._module)  # shards stay where the next run uses them
            super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make `Trainer(strategy="3d_zero1")` and its like work; called when the package is imported."""
        for name, description, arguments in NAMES:
            strategy_registry.register(name, cls, description=description, override=True, **arguments)
        refuse_mistakes(strategy_registry)
