"""The module at the start of a run, built in parts and moved to its device, and at the end: whole or in shards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import distributed as dist

from lightning_3d import precision
from lightning_3d.launch import SpawnLauncher
from lightning_3d.module.materialize import materialize
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.parallel.parallel_plan import ParallelPlan, UserChoices
from lightning_3d.ranks.random_streams import share_random_state
from lightning_3d.sandbox.deferred import realize
from lightning_3d.strategy.first_values import built_in_parts, keep_on_host, share_first_values, warn_of_full
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
from lightning_3d.strategy.training import Training
from lightning_3d.verify.first_step import Verify
from lightning_3d.zero.data_batch_norm import DataBatchNorm


class Placing(Training):
    """Places a module that is not split yet, or reuses the shards that an earlier run has left."""

    _choices: UserChoices
    _teardown: Teardown
    _verify: Verify | None
    _plan: ParallelPlan | None = None
    _stays_in_shards = False
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

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build modules in parts: in `configure_model`, in `trainer.init_module()`, and on meta."""
        with super().tensor_init_context(empty_init), self._in_parts():
            yield

    @contextmanager
    def _in_parts(self) -> Iterator[None]:
        if not self._divides:
            yield
            return
        with built_in_parts() as built:
            yield
        self._built = (*self._built, built)

    def model_to_device(self) -> None:
        if any(tensor.is_meta for tensor in (*self._module.parameters(), *self._module.buffers())):
            with self._in_parts():
                materialize(self._module, self.root_device)
        if self._divides:
            keep_on_host(self._module, self.root_device)
        self._module.to(self.root_device)

    def _keeps_shards(self, trainer: Trainer) -> bool:
        callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
        ends = isinstance(self._launcher, SpawnLauncher) or dist.get_backend() == "fake"
        return stays_in_shards(
            self._teardown, self._module, self.layout, callbacks, ends=ends, ranks_of_host=self.ranks_of_host,
            device=self.root_device,
        )  # fmt: skip

    def _reuse_shards(self, in_shards: InShards) -> None:
        """Use the shards that an earlier run has left."""
        in_shards.check_parameters()
        in_shards.rest.end()
        self._parallel, self._plan = in_shards.parallel, in_shards.plan
        put_shards(self._module, None)
        self._undo.callback(self._leave_module, self._parallel)
        self.precision_plugin.compute_on(self.root_device)
        self._share_random_state()

    def _check_reuse(self, in_shards: InShards) -> None:
        callbacks: Any = self._module.trainer.callbacks  # type: ignore[attr-defined]
        in_shards.check(self._module, self._settings)
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
        for axis in self.layout.peer_axes:
            share_random_state(self.mesh.get_group(axis))

    def _leave_module(self, parallel: ParallelModule) -> None:
        """Make the module whole at the end of a run, or leave it in shards."""
        if self._failed:
            parallel.abandon()
        elif not self._stays_in_shards or self._plan is None:
            parallel.undo(self.optimizers)
            self._share_buffers()
        elif self._judged:
            parallel.abandon()
            rank_zero_warn(f"{type(self._module).__name__} is in shards and cannot be used after the error. {AGAIN}")
        else:
            parallel.leave_in_shards()
            self._share_buffers()
            if self._teardown == "auto" and self._in_shards is None:
                rank_zero_info(why_in_shards(self._module))
            shards = InShards.of(parallel, self._plan, self._settings, self.mesh, self.data_axis)
            put_shards(self._module, shards)

    def _to_device(self, batch: Any) -> Any:
        batch = self._module._on_before_batch_transfer(self.precision_plugin.convert_input(batch))
        return self.batch_to_device(batch)  # which calls the other two hooks
