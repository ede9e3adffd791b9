"""Division of a module at the start of a run, and what is left of it at the end."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import distributed as dist

from lightning_3d import parallelize, precision
from lightning_3d.dryrun import DryLauncher
from lightning_3d.launch import SpawnLauncher
from lightning_3d.layout import PIPELINE_AXIS, TENSOR_AXIS
from lightning_3d.module.batchnorm import DataBatchNorm
from lightning_3d.module.state_dict import full_module_state
from lightning_3d.parallelize import ParallelModule, ParallelPlan, UserChoices
from lightning_3d.ranks import talk
from lightning_3d.ranks.random_streams import share_random_state
from lightning_3d.sandbox.deferred import realize
from lightning_3d.strategy.building import Building
from lightning_3d.strategy.first_values import share_first_values, warn_of_full
from lightning_3d.strategy.in_shards import (
    AGAIN,
    InShards,
    Settings,
    Teardown,
    check_goes_on,
    put_shards,
    stays_in_shards,
    why_in_shards,
)
from lightning_3d.usercode.averages_private import shard_averages
from lightning_3d.verify.first_step import FirstStep, Verify


class Dividing(Building):
    """Divides a whole module, or goes on with the shards that an earlier run has left."""

    _choices: UserChoices
    _teardown: Teardown
    _verify: Verify | None
    _plan: ParallelPlan | None = None
    _stays = False
    """True where the module stays in shards after the present run."""

    def __init__(self, **saving: Any) -> None:
        self._default_precision = precision.convert(None)
        super().__init__(**saving)

    @property
    def precision_plugin(self) -> precision.Precision3D:
        plugin = self._precision_plugin if self._precision_plugin is not None else self._default_precision
        assert isinstance(plugin, precision.Precision3D)
        return plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # None stays None: Lightning takes any plugin for the user's choice, and then refuses `precision=`
        self._precision_plugin = None if plugin is None else precision.convert(plugin)

    def _will_stay(self, trainer: Trainer) -> bool:
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        ends = isinstance(self._launcher, SpawnLauncher | DryLauncher) or dist.get_backend() == "fake"
        return stays_in_shards(
            self._teardown, self._module, self.layout, callbacks, ends=ends, ranks_of_host=self.num_processes,
            device=self.root_device,
        )  # fmt: skip

    def _divide(self, trainer: Trainer, fitting: bool) -> FirstStep | None:
        """Place a whole module and apply the parallelisms."""
        module, self._plan = self._module, None
        parallel = ParallelModule(module)
        self._undo.callback(self._leave_module, parallel)
        self._place_unsplit(parallel, fitting)
        first = FirstStep(module, self.precision_plugin.forward_context) if self._verifies_first(fitting) else None
        self._plan = plan = parallelize.make_plan(
            trainer, module, self.layout, self._choices, self._to_device, self.precision_plugin
        )
        if fitting:
            self._announce(plan)
        self._apply(parallel, plan, fitting)
        return first

    def _go_on(self, in_shards: InShards, fitting: bool) -> None:
        """Use the shards that an earlier run has left."""
        in_shards.check_parameters()
        self._parallel, self._plan = in_shards.parallel, in_shards.plan
        put_shards(self._module, None)
        self._undo.callback(self._leave_module, self._parallel)
        self.precision_plugin.compute_on(self.root_device)
        self._share_random_state()
        if fitting:
            self._announce(self._plan)

    def _continues(self, in_shards: InShards) -> None:
        callbacks: Any = self._module.trainer.callbacks  # type: ignore[attr-defined]
        in_shards.check_settings(self._settings)
        check_goes_on(self._module, callbacks, self._verify)

    def _verifies_first(self, fitting: bool) -> bool:
        return fitting and self._verify == "first_step"

    @property
    def _settings(self) -> Settings:
        plugin = self.precision_plugin
        return Settings(self.layout, self._choices, f"{type(plugin).__name__}({plugin.precision})")

    def _place_unsplit(self, parallel: ParallelModule, fitting: bool) -> None:
        """Convert the module, move it to the device, and give every rank equal weights and equal random streams."""
        module = self._module
        sync = self._layer_sync
        if fitting and sync is not None:
            sync = DataBatchNorm(self.data_group) if isinstance(sync, TorchSyncBatchNorm) else sync
            sync.apply(module)
            parallel.changes.callback(sync.revert, module)
        self.precision_plugin.compute_on(self.root_device)
        self.precision_plugin.convert_module(module)
        self.model_to_device()
        share_first_values(module)
        warn_of_full(module, self._built)
        self._built = ()
        if self._verifies_first(fitting):
            realize(module.parameters())  # its copy needs all of them
        self._share_random_state()

    def _share_random_state(self) -> None:
        for axis in (TENSOR_AXIS, PIPELINE_AXIS):
            share_random_state(self.mesh.get_group(axis))

    def _apply(self, parallel: ParallelModule, plan: ParallelPlan, fitting: bool) -> None:
        self._parallel = parallel
        module, plugin, device = self._module, self.precision_plugin, self.root_device
        training = fitting or self._stays  # a later run may train with these shards
        parallelize.parallelize(
            parallel, plan, self.layout, self.mesh, self.data_axis, plugin, device, training=training
        )
        full_module_state(
            module, parallel.gather_full, parallel.take_shard, parallel.stages, talk.meet, parallel.changes
        )
        callbacks: Any = module.trainer.callbacks  # type: ignore[attr-defined]
        shard_averages(callbacks, parallel, self._as_saved)

    def _leave_module(self, parallel: ParallelModule) -> None:
        """Make the module whole at the end of a run, or leave it in shards."""
        if self._failed:
            parallel.abandon()
        elif not self._stays or self._plan is None:
            parallel.undo(self.optimizers)
            self._share_buffers()
        elif self._judged:
            parallel.abandon()
            rank_zero_warn(f"{type(self._module).__name__} is in shards and cannot be used after the error. {AGAIN}")
        else:
            parallel.rest()
            self._share_buffers()
            if self._teardown == "auto" and self._in_shards is None:
                rank_zero_info(why_in_shards(self._module))
            shards = InShards.of(parallel, self._plan, self._settings, self.mesh, self.data_axis)
            put_shards(self._module, shards)

    def _to_device(self, batch: Any) -> Any:
        batch = self._module._on_before_batch_transfer(self.precision_plugin.convert_input(batch))
        return self.batch_to_device(batch)  # which calls the other two hooks
