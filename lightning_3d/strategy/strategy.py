"""`Strategy3D`: Lightning's hooks in order. What each does lives in the packages it calls."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.hooks import RemovableHandle

from lightning_3d import parallelize, precision
from lightning_3d.auto_layout import LayoutChoice, auto_layout
from lightning_3d.checkpoint import CheckpointFormat
from lightning_3d.comm.config import CommConfig, GradCompression, GradSync
from lightning_3d.data.same_samples import SampleCheck
from lightning_3d.dryrun import DryLauncher, current_world, parse_cluster, world_for
from lightning_3d.errors import ConfigurationError
from lightning_3d.faults import flight
from lightning_3d.layout import PIPELINE_AXIS, TENSOR_AXIS, Layout, Offload, Schedule, ZeroStage
from lightning_3d.module import state_dict
from lightning_3d.module.batchnorm import DataBatchNorm
from lightning_3d.module.materialize import materialize
from lightning_3d.module.metrics import gather_over
from lightning_3d.optim.grad_norm import clip_like_one_device
from lightning_3d.optim.probe import check_state
from lightning_3d.optim.step import refuse_new_parameters, step_like_one_device
from lightning_3d.parallelize import LossScope, ParallelModule, UserChoices, cut, divide
from lightning_3d.pipeline.limits import check_automatic, check_supported
from lightning_3d.planner.choose import Fixed
from lightning_3d.ranks import talk
from lightning_3d.ranks.random_streams import StepRandom, share_random_state
from lightning_3d.ranks.talk import broadcast_tensors
from lightning_3d.strategy.checks import check_hooks, check_module, check_same_module, use_callbacks, use_no_grad
from lightning_3d.strategy.processes import StartMethod
from lightning_3d.strategy.registry import NAMES
from lightning_3d.strategy.resume import Resume
from lightning_3d.strategy.steps import CheckedRunner, make_steps, prove_cut
from lightning_3d.strategy.training import Training
from lightning_3d.usercode.averages_private import shard_averages
from lightning_3d.usercode.between_steps import HookRules
from lightning_3d.usercode.hooks import wrap_hooks
from lightning_3d.verify.first_step import FirstStep, Verify
from lightning_3d.verify.replicas import ReplicaCheck


class Strategy3D(Training):
    """Train an unchanged LightningModule with data, tensor and pipeline parallelism and ZeRO.

    Args:
        layout: "auto" lets the planner choose the three sizes and the ZeRO stage, for the module, its first batch and
            the devices that are there, and say why; those that are given beside it are kept.
        data_parallel_size: ranks that see different data; "auto" takes what the other axes leave.
        tensor_parallel_size: ranks that share every large matrix; 1 if not given.
        pipeline_parallel_size: ranks that hold different blocks; 1 if not given.
        zero_stage: what the data ranks share: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters;
            1 if not given.
        zero_shard_size: share among so many data ranks only and replicate between them (hybrid shard).
        schedule: order of forwards and backwards in the pipeline.
        stages_per_rank: virtual stages of each pipeline rank, for the interleaved and V schedules.
        num_microbatches: pieces that the pipeline cuts a batch into; "auto" picks from the batch.
        pipeline_split: names of the first block of each stage but the first, instead of a balanced cut.
        loss_scope: "batch" computes the loss once on the whole batch, for losses that are no mean over samples.
        sequence_parallel: also divide norms and dropout along the sequence, over the tensor ranks.
        tensor_plan: module or parameter names (patterns) -> "column", "row", "column:3" or "whole"; overrides what
            would be inferred, and is proven like it.
        grad_sync: how gradients are averaged: "ring" is ours, "native" the backend's, "hierarchical" a ring inside each
            node and then between nodes; "auto" is the ring on gloo and the backend's own on NCCL.
        grad_compression: send gradients as "bf16", "fp16", "int8" or "powersgd", with error feedback.
        offload: "all" keeps parameters, gradients and optimizer states of a sharded stage in host memory.
        checkpoint_format: "full" is Lightning's own single file; "sharded" a directory to which every rank writes its
            part and from which any layout loads; "auto" is "full" while the training state fits in a gigabyte.
        async_checkpoint: save a copy of the state in the background; training waits for the copy only. One save at a
            time; what went wrong is told at the next one, and the last is awaited at the end.
        resume: "auto" goes on from the newest whole checkpoint of this run when `fit` is given no `ckpt_path`, also on
            another number of ranks, with the same global batch.
        quiet: do not say at the start of `fit` which rank holds what.
        verify: "first_step" also computes the first gradients with the unsplit module, which takes its memory, and
            compares; "replicas" compares every 25 batches what ranks hold copies of. Either raises a DivergenceError.
        dry_run: a cluster ("128x8xh100", "8xcpu", or a number of ranks): `fit` then trains nothing; it reports, from
            shapes only, what ranks of that cluster would hold and send, and what would go wrong.
        timeout: after which a rank that waits for another gives up, as a `timedelta` or in seconds. To start, ranks
            have five minutes at least.
        start_method: how processes start where no launcher started them; "popen" runs your script again, "auto" does
            so where there is a script and forks in a notebook or at a prompt.
        process_group_backend: "gloo", "nccl" ...; chosen by the device if not given.
    """

    strategy_name = "3d"

    def __init__(
        self,
        *,
        layout: LayoutChoice = "given",
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        zero_stage: ZeroStage | None = None,
        zero_shard_size: int | None = None,
        schedule: Schedule = "1f1b",
        stages_per_rank: int = 1,
        num_microbatches: int | Literal["auto"] = "auto",
        pipeline_split: list[str] | None = None,
        loss_scope: LossScope = "microbatch",
        sequence_parallel: bool = False,
        tensor_plan: dict[str, str] | None = None,
        grad_sync: GradSync | Literal["auto"] = "auto",
        grad_compression: GradCompression | None = None,
        offload: Offload = "none",
        checkpoint_format: CheckpointFormat = "auto",
        async_checkpoint: bool = False,
        resume: Resume | None = None,
        quiet: bool = False,
        verify: Verify | None = None,
        dry_run: str | None = None,
        timeout: timedelta | float = 1800.0,
        start_method: StartMethod = "auto",
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self._default_precision = precision.convert(None)
        super().__init__(
            resume=resume, checkpoint_format=checkpoint_format, async_checkpoint=async_checkpoint, timeout=timeout,
            start_method=start_method, process_group_backend=process_group_backend, accelerator=accelerator,
            parallel_devices=parallel_devices, cluster_environment=cluster_environment, checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )  # fmt: skip
        self._wanted = Layout(
            data_parallel_size=1 if data_parallel_size == "auto" else data_parallel_size,
            tensor_parallel_size=1 if tensor_parallel_size is None else tensor_parallel_size,
            pipeline_parallel_size=1 if pipeline_parallel_size is None else pipeline_parallel_size,
            zero_stage=1 if zero_stage is None else zero_stage,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            num_microbatches=num_microbatches,
            sequence_parallel=sequence_parallel,
            offload=offload,
        )
        self._choices = UserChoices(pipeline_split=pipeline_split, loss_scope=loss_scope, tensor_plan=tensor_plan)
        if verify not in (None, "first_step", "replicas"):
            raise ConfigurationError(f"verify={verify!r} is none of None, 'first_step', 'replicas'.")
        self._verify = verify
        data = None if data_parallel_size == "auto" else data_parallel_size
        given = Fixed(data=data, tensor=tensor_parallel_size, pipeline=pipeline_parallel_size, zero=zero_stage)
        self._auto = auto_layout(layout, self._wanted, given)
        self._chooses = self._auto is not None
        self._data_parallel_size = data_parallel_size
        self._zero_shard_size = zero_shard_size
        self._grad_sync: GradSync | Literal["auto"] = grad_sync
        self._grad_compression = grad_compression
        CommConfig(grad_sync="ring" if grad_sync == "auto" else grad_sync, grad_compression=grad_compression)
        self._quiet = quiet
        self._dry_world = None if dry_run is None else world_for(self, parse_cluster(dry_run))
        self._composed: ParallelModule | None = None
        self._patches: list[Callable[[], None]] = []
        """What undoes what was changed in torch and torchmetrics, after a failed run too."""
        self._hooks: list[RemovableHandle] = []
        self._undo: list[Callable[[], None]] = []
        self._unshard_averages: Callable[[], None] | None = None
        """Collective; not called after a failed run."""

    def _configure_launcher(self) -> None:
        world = current_world() or self._dry_world
        if world is None:
            super()._configure_launcher()
        else:
            self._launcher = DryLauncher(world)

    @property
    def layout(self) -> Layout:
        """The layout for the number of processes there are."""
        layout = self._refitted or self._wanted
        if self._auto is not None:
            layout = self._auto.layout(self.world_size)
        elif self._data_parallel_size == "auto":
            layout = layout.fit(self.world_size)
        layout.check_world(self.world_size)
        return replace(layout, zero_shard_size=self._zero_shard_size)

    def _comm_config(self) -> CommConfig:
        auto: GradSync = "native" if self._streams else "ring"
        return CommConfig(
            grad_sync=auto if self._grad_sync == "auto" else self._grad_sync,
            grad_compression=self._grad_compression,
            ranks_per_node=self.num_processes // (self.layout.tensor_parallel_size) or 1,
        )

    @property
    def precision_plugin(self) -> precision.Precision3D:
        plugin = self._precision_plugin if self._precision_plugin is not None else self._default_precision
        assert isinstance(plugin, precision.Precision3D)
        return plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # None stays None: Lightning takes anything else for the user's own choice and refuses `precision=` beside it
        self._precision_plugin = None if plugin is None else precision.convert(plugin)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or the strategy sent to a spawned process, starts without what belongs to this process."""
        fresh: dict[str, Any] = {
            "_mesh": None,
            "_communication": None,
            "_watch": None,
            "_preemption": None,
            "_composed": None,
            "_steps": None,
            "_hooks": [],
            "_undo": [],
            "_unshard_averages": None,
            "_patches": [],
            "_clones": None,
            "_left": {},
        }
        return {**super().__getstate__(), **fresh}

    # ---- describe -> place -> apply ------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        flight.at("placing the module")
        self.accelerator.setup(trainer)
        module = self._module
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._begin_run(trainer)
        check_same_module(module)
        check_module(module, fitting)
        if self._auto is not None:
            self._auto.choose(trainer, module, self, self._to_device)
            self._open_axes()
        if fitting:
            check_hooks(module, self.layout)
            if self.layout.pipeline_parallel_size > 1:
                check_automatic(module)  # before anything is looked for that only other modules have
            self._undo.append(use_callbacks(trainer.callbacks, module, self.layout))  # type: ignore[attr-defined]
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        hooked = wrap_hooks(module, callbacks, lambda: self._composed, lambda: self._data)
        self._patches.append(hooked)
        use_no_grad(trainer)
        if fitting and self._layer_sync is not None:
            if isinstance(self._layer_sync, TorchSyncBatchNorm):
                self._layer_sync = DataBatchNorm(self.data_group)
            self._layer_sync.apply(module)
        self.precision_plugin.compute_on(self.root_device)
        self.precision_plugin.convert_module(module)
        self.model_to_device()
        broadcast_tensors([*module.parameters(), *module.buffers()], group=None)
        for axis in (TENSOR_AXIS, PIPELINE_AXIS):
            share_random_state(self.mesh.get_group(axis))
        plugin, first_step = self.precision_plugin, fitting and self._verify == "first_step"
        first = FirstStep(module, plugin.forward_context) if first_step else None
        self._patches.append(gather_over(self.data_group, self.layout))
        plans = parallelize.make_plans(
            trainer, module, self.layout, self._choices, self._to_device, self.from_rank_zero, plugin
        )
        if fitting:
            self._say_opening(plans)
        make = parallelize.pipelines(
            plans, self.layout, self._choices, mesh=self.mesh, device=self.root_device, ledger=self._sending.ledger
        )
        self._composed = composed = cut(module, plans, self.layout, self.mesh)
        prove_cut(composed, plans, make, plugin)
        divide(composed, plans, self.layout, self.mesh, self._sending, plugin.policy(), training=fitting)
        self._hooks = state_dict.full_module_state(module, composed.whole, composed.part, composed.stages, talk.meet)
        self._unshard_averages = shard_averages(callbacks, composed, self._as_saved)
        if fitting:
            self._tell_callbacks()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            self._patches.append(clip_like_one_device(module, self._norm_of))
            _optimizers_to_device(self.optimizers, self.root_device)
        random = StepRandom(self.layout, self.coordinate, self.root_device)
        steps = make_steps(trainer, composed, plans, make, random=random, plugin=plugin)
        replicas = ReplicaCheck(composed, self.layout, self.root_device) if self._verify == "replicas" else None
        self._steps = CheckedRunner(
            steps,
            SampleCheck(self.layout, self.coordinate, self.mesh, self.root_device),
            replicas,
            first,
            composed=composed,
            group=self.data_group,
            random=random,
            loss_scale=plugin.loss_scale,
            window=lambda: trainer.accumulate_grad_batches,
            epoch=lambda: trainer.current_epoch,
            evaluation=lambda: self._evaluations,
        )

    def _to_device(self, batch: Any) -> Any:
        batch = self._module._on_before_batch_transfer(self.precision_plugin.convert_input(batch))
        return self.batch_to_device(batch)  # which calls the other two hooks

    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        # an optimizer that was built before its parameters were placed still holds the originals
        composed = self._applied
        if composed.split is not None:
            check_supported(self._module, self.optimizers)
        state_dict.swap_parameters(self.optimizers, composed.swaps)
        for optimizer in self.optimizers:
            if self.layout.holds_parts:
                check_state(optimizer)
            for absent in [parameter for parameter in optimizer.state if parameter.is_meta]:
                del optimizer.state[absent]  # some fill their state when they are built (Adagrad)
            stepping = step_like_one_device(
                optimizer, composed.whole, composed.part, self.reduce,
                watch=lambda name, remedy: HookRules(name, composed, set(), remedy=remedy),
                pipelined=composed.split is not None,
            )  # fmt: skip
            self._undo.append(stepping)
            self._undo.append(refuse_new_parameters(optimizer, self._module, self.layout))
            self._hooks += state_dict.full_optimizer_state(
                optimizer, composed.whole, composed.part, composed.stages, talk.meet
            )

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        self.precision_plugin.clip_norm = self._clip_norm
        self.precision_plugin.around_backward = self._around_backward

    def model_to_device(self) -> None:
        materialize(self._module, self.root_device)
        self._module.to(self.root_device)

    # ---- end -----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Make the module plain and whole on every rank, so that it can be used as after training on one device."""
        if not self._failed:
            self._end_of_run()
            self._restore()
        while self._patches:
            self._patches.pop()()
        self._composed, self._steps, self._unshard_averages = None, None, None
        super().teardown()

    def _restore(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._unshard_averages is not None:
            self._unshard_averages()
        for undo in reversed(self._undo):
            undo()
        self._hooks, self._undo = [], []
        if self._steps is not None:
            self._steps.close()
        composed = self._composed
        if composed is not None:
            composed.undo(self.optimizers)
        if self._mesh is not None and self.lightning_module is not None:
            if composed is not None:  # else the run failed before anything was placed, and ranks may hold other buffers
                self._share_buffers()
            if isinstance(self._layer_sync, DataBatchNorm):
                self._layer_sync.revert(self._module)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make `Trainer(strategy="3d_zero1")` and its like work; called when the package is imported."""
        for name, description, arguments in NAMES:
            strategy_registry.register(name, cls, description=description, override=True, **arguments)
