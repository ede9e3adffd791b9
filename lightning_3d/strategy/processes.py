"""The processes of one job as Lightning asks for them: their start, places, modules and messages."""

import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import gcd
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_3d.axes.group import reduced
from lightning_3d.checkpoint import watching_last
from lightning_3d.data.same_samples import code_that_asks
from lightning_3d.errors import ConfigurationError, DivergenceError, RunError
from lightning_3d.extensions import LayoutChooser, simulating
from lightning_3d.faults.flight_recorder import set_nccl_watchdog
from lightning_3d.launch import ScriptLauncher, SpawnLauncher, can_run_again, joined, store_of_attempt
from lightning_3d.launch.lightning_private import Launcher, default_process_group_backend, init_dist_connection
from lightning_3d.layout import DATA_AXIS, Coordinate, Layout
from lightning_3d.module.materialize import materialize
from lightning_3d.precision import Precision3D, convert
from lightning_3d.ranks import rank_zero, talk
from lightning_3d.ranks.random_streams import share_seeded_state
from lightning_3d.ranks.shards import unsharded
from lightning_3d.ranks.users_group_private import users_group
from lightning_3d.sandbox.deferred import Built
from lightning_3d.strategy.checkpoints import Checkpoints
from lightning_3d.strategy.checks import check_same_layout
from lightning_3d.strategy.in_shards import shards_of
from lightning_3d.strategy.one_run import NO_FAILURES, Failure, Run, flight_folder, let_save, move_old_records
from lightning_3d.strategy.placing import built_in_parts, keep_on_host, open_axes
from lightning_3d.strategy.registry import refuse_other_names
from lightning_3d.strategy.resume import Sizes, resume_earlier
from lightning_3d.strategy.settings import Settings
from lightning_3d.zero.data_axis import DataAxis

T = TypeVar("T")
_OF_OTHERS = r"`isinstance\(treespec, LeafSpec\)` is deprecated|Slicing a flattened dim from root mesh"
"""Torch 2.13 warns of Lightning 2.6 itself, and where parts of a mesh have names of their own; on each rank."""


class Processes(ParallelStrategy):
    """A strategy of Lightning that knows the places of its processes in a layout, and builds modules on them."""

    is_distributed = True
    """Lightning injects a DistributedSampler and honours `sync_dist=True` only where this is set."""
    run: Run | None = None
    """None before and after a run."""
    _last_mesh: DeviceMesh | None = None
    """Of the run before: its process groups are there as long as the process."""

    def __new__(cls, *args: Any, **arguments: Any) -> Any:
        refuse_other_names(arguments)  # before Python's own error, which does not know our name
        return super().__new__(cls)

    def __init__(self, settings: Settings, auto: LayoutChooser | None, *lightning: Any) -> None:
        self._default_precision = convert(None)
        super().__init__(*lightning)
        self.settings = settings
        self.sizes, self.checkpoints, self.failure = Sizes(settings, auto), Checkpoints(settings), Failure()
        self.num_nodes = 1  # the Trainer says how many
        self._built: tuple[Built, ...] = ()
        """Modules that were built since the last run."""
        self._dry_run: Launcher | None = None
        """Simulates the ranks of another cluster in place of this machine's."""
        self._given_path: object = None
        self._nodes: Sequence[int] = ()
        """The node of each rank, where the launcher started another number of processes than the Trainer expects."""
        self._world_asked_by: str | None = None
        """The user's method that reads `trainer.world_size` or `num_devices`, and which."""
        self._world_warning = self._rank_warning = ""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "run": None, "_last_mesh": None, "_built": ()}

    def __repr__(self) -> str:
        """Shown by a Trainer of the separate `pytorch_lightning` package, which refuses other class trees."""
        return (
            f"<lightning_3d.{type(self).__name__} for Trainer of `lightning.pytorch`, not of `pytorch_lightning`:"
            " call lightning_3d.serve_pytorch_lightning() before anything imports that>"
        )

    # ---- start ---------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        warnings.filterwarnings("ignore", _OF_OTHERS, Warning)
        if (simulation := self._simulation) is not None:
            self._launcher = simulation
            return
        assert self.cluster_environment is not None
        environment, method = self.cluster_environment, self.settings.start_method
        if method == "auto":
            starts_none = environment.creates_processes_externally or self.num_processes * self.num_nodes == 1
            method = "popen" if starts_none or can_run_again() else "fork"
        if method == "popen":
            self._launcher = ScriptLauncher(environment, self.num_processes, self.num_nodes, self._guarded)
        else:
            self._launcher = SpawnLauncher(self, method, self._guarded)

    @property
    def _simulation(self) -> Launcher | None:
        return simulating[-1] if simulating else self._dry_run

    def _guarded(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call the Trainer's `function`. Explain an error that another rank caused, before any callback gets it."""
        self._given_path = inspect.signature(function).bind_partial(*args, **kwargs).arguments.get("ckpt_path")
        try:
            # Lightning reads ckpt_path="last" before any hook of a strategy
            with watching_last(self.checkpoints.keeper.prefer):
                return function(*args, **kwargs)
        except NO_FAILURES:
            raise
        except BaseException as error:
            cause = self._world_warning or self._rank_warning
            if cause and isinstance(error, ConfigurationError | DivergenceError | IndexError):
                error.args = (f"{str(error).rstrip('.')}. This may be the cause: {cause}",)
            explained = self.failure.explained(error, self.lightning_module, self.world_size)
            if explained is error:
                raise
            raise explained from error

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Join the other processes, and open the axes of the layout where it is known already."""
        module, trainer, settings = self._module, self._module.trainer, self.settings
        self.failure, self.run = Failure(), None
        let_save(trainer)
        super().setup_environment()
        self.set_world_ranks()
        folder = flight_folder(trainer.default_root_dir)
        follows_another = self._join(folder)
        self.failure.start_watch(self.global_rank, settings.timeout, folder)
        connector = trainer._accelerator_connector
        self.run = run = Run(
            trainer=trainer, module=module, settings=settings, plugin=self.precision_plugin, device=self.root_device,
            rank=self.global_rank, streams=self._streams, failure=self.failure, follows_another=follows_another,
            wants_sampler=connector.use_distributed_sampler, in_shards=shards_of(module),
        )  # fmt: skip
        run.undo.callback(setattr, connector, "use_distributed_sampler", run.wants_sampler)
        self.checkpoints.begin_run(run)
        self.sizes.begin_run(module)
        share_seeded_state()
        self._nodes = self._find_nodes()
        if settings.resume == "auto" and run.fitting and self._given_path is None:
            resume_earlier(run, self.sizes, self.checkpoints.keeper, self.world_size)
        if self.local_rank == 0 and dist.get_backend() != "fake":
            move_old_records(folder)
        layout = check_same_layout(lambda: self.layout, self.world_size)
        self.failure.name_places(layout)
        if run.in_shards is not None or self.sizes.auto is None:  # else `setup` chooses, from the module and its data
            self.open_axes(layout)

    def _join(self, folder: Path) -> bool:
        """Join the process group of the job, or use one that is there: True. `folder` is for flight records."""
        device, timeout = self.root_device, self.settings.timeout
        backend = self.process_group_backend
        set_nccl_watchdog(backend, folder)
        assert self.cluster_environment is not None
        splits_groups = device.type != "cpu" and backend != "gloo"
        options: dict[str, Any] = {"timeout": timeout, "device_id": device if splits_groups else None}
        is_there = dist.is_initialized()
        if not is_there and backend != "fake":
            options |= store_of_attempt(self.cluster_environment, self.global_rank, self.world_size, timeout)
        init_dist_connection(self.cluster_environment, backend, **options)
        return is_there

    def open_axes(self, layout: Layout) -> None:
        """Open the mesh and the groups of `layout`, or use those of a module in shards. Every rank must call it."""
        open_axes(self._current, layout, self.ranks_per_node)
        self._warn_of_world_size()

    @property
    def _streams(self) -> bool:
        """True where the backend overlaps communication by itself (CUDA). Else a thread of ours does."""
        return self.root_device.type != "cpu"

    # ---- who and where -------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """The layout of the run. Outside of one, that for the present number of processes."""
        chosen = None if self.run is None else self.run.layout
        return self.sizes.layout(self.world_size) if chosen is None else chosen

    @property
    def coordinate(self) -> Coordinate:
        return self.layout.coordinate(self.global_rank)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that work on different samples. Divide a batch size by this, not by `trainer.world_size`."""
        return self.layout.data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """The share of the samples that this rank works on. Equal on tensor and pipeline peers."""
        return self.coordinate.data

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    @property
    def mesh(self) -> DeviceMesh:
        return self._last_mesh if self.run is None and self._last_mesh is not None else self._current.mesh

    @property
    def data_axis(self) -> DataAxis:
        return self._current.data_axis

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:  # type: ignore[override]
        """The launcher of the processes, also one that Lightning does not know."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        self._cluster_environment = joined(environment)

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        # Ray starts several processes where the Trainer sees one CPU; others show a process only its own device
        return self.parallel_devices[self.local_rank if len(self.parallel_devices) > 1 else 0]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def ranks_per_node(self) -> int:
        """A number that divides the ranks of every node."""
        return gcd(*Counter(self._nodes).values()) or self.num_processes

    @property
    def ranks_of_host(self) -> int:
        """Ranks that share the memory of this machine."""
        return self._nodes.count(self.node_rank) or self.num_processes

    def _find_nodes(self) -> Sequence[int]:
        """The node of each rank, empty where each has as many ranks as the Trainer expects. Collective elsewhere."""
        size = dist.get_world_size()
        if size in (1, self.num_processes * self.num_nodes) or size != self.world_size:  # the last is refused later
            return ()
        return talk.gather(self.node_rank)

    @property
    def world_size(self) -> int:
        self._warn_of_world_size(sys._getframe(1))
        return super().world_size

    @property
    def global_rank(self) -> int:
        chosen = None if self.run is None else self.run.layout
        shared = chosen is not None and chosen.data_parallel_size != chosen.world_size
        if shared and not self._rank_warning and (asked_by := code_that_asks(sys._getframe(1))):
            use = "but all_gather has one part of each data rank. Use trainer.strategy.data_parallel_rank."
            self._rank_warning = f"{asked_by}, {use}"
        return super().global_rank

    @property
    def parallel_devices(self) -> list[torch.device] | None:  # type: ignore[override]
        self._warn_of_world_size(sys._getframe(1))
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = devices

    def _warn_of_world_size(self, asker: FrameType | None = None) -> None:
        """Warn once where user code divides its data over all ranks and some of them share their samples."""
        self._world_asked_by = self._world_asked_by or (None if asker is None else code_that_asks(asker))
        chosen = None if self.run is None else self.run.layout
        if self._world_asked_by is None or chosen is None or self._world_warning:
            return
        if chosen.data_parallel_size != chosen.world_size:
            self._world_warning = (
                f"{self._world_asked_by}, but tensor and pipeline peers work on the same samples: data is divided"
                f" over {chosen.data_parallel_size} of {chosen.world_size} ranks here. Batches that it divides have"
                " fewer samples than you mean, or peers other ones. A learning rate or a number of steps that it"
                " scales is not that of one device. Use trainer.strategy.data_parallel_size, and shard by"
                " trainer.strategy.data_parallel_rank."
            )
            if dist.get_rank() == 0:  # in runs ahead of training no rank acts as rank 0
                warnings.warn(self._world_warning, stacklevel=2)

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _current(self) -> Run:
        if self.run is None:
            raise RunError(
                "trainer.strategy was asked outside of a run for what ranks have only in one: mesh, stages, gradients."
                " Ask in a hook or a callback of fit, validate, test or predict, for example in on_train_epoch_end."
            )
        return self.run

    @property
    def process_group_backend(self) -> str:
        return self.settings.process_group_backend or default_process_group_backend(self.root_device)

    @property
    def precision_plugin(self) -> Precision3D:
        plugin = self._precision_plugin if self._precision_plugin is not None else self._default_precision
        assert isinstance(plugin, Precision3D)
        return plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # None stays None: Lightning takes any plugin for the user's choice, and then refuses `precision=`
        self._precision_plugin = None if plugin is None else convert(plugin)

    # ---- modules -------------------------------------------------------------------------------------------------

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

    def take_built(self) -> Sequence[Built]:
        """The modules that were built since the last run. They are forgotten."""
        built, self._built = self._built, ()
        return built

    @property
    def _divides(self) -> bool:
        """True where ranks are going to have parts of a module that has values."""
        return self.world_size > 1 and self._simulation is None

    def model_to_device(self) -> None:
        if any(tensor.is_meta for tensor in (*self._module.parameters(), *self._module.buffers())):
            with self._in_parts():
                materialize(self._module, self.root_device)
        if self._divides:
            keep_on_host(self._module, self.root_device)
        self._module.to(self.root_device)

    def to_device(self, batch: Any) -> Any:
        batch = self._module._on_before_batch_transfer(self.precision_plugin.convert_input(batch))
        return self.batch_to_device(batch)  # which calls the other two hooks

    def as_saved(self) -> AbstractContextManager[None]:
        """Return shards for a sharded checkpoint, full states for a single file."""
        return self.checkpoints.as_saved(self._module, self.checkpoint_io)

    # ---- messages ------------------------------------------------------------------------------------------------

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the data ranks, or from `group` if given: tensor and pipeline peers have the same values."""
        given = None if group is dist.group.WORLD else group  # Lightning names all ranks where the user names none
        if given is None and self.run is not None:
            self.run.data.meet()
        return super().all_gather(tensor, given or users_group(), sync_grads)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data axis, or over `group` if given: tensor and pipeline peers have the same values."""
        if not isinstance(tensor, Tensor) or (self._last_mesh if self.run is None else self.run.opened) is None:
            return tensor
        if group is None and self.data_parallel_size == 1:
            return tensor
        if group is None and self.run is not None:
            self.run.data.meet()
        if isinstance(tensor, DTensor):  # of a weight that is logged
            tensor = unsharded(tensor)
        return reduced(tensor, group or self.mesh.get_group(DATA_AXIS), reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide over every rank of the world, on all axes."""
        rank_zero.refuse_where_local("a decision of all ranks")
        return not talk.any_rank(not decision) if all else talk.any_rank(decision)

    @property
    def is_global_zero(self) -> bool:
        return rank_zero.is_zero(self.global_rank)

    def barrier(self, name: str | None = None) -> None:
        rank_zero.refuse_where_local("a barrier")
        talk.barrier(self.root_device)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        if rank_zero.is_rank_local():
            return rank_zero.answer_to(obj)
        answer = talk.from_first(lambda: obj, first=src)
        if src == 0:
            rank_zero.remember(obj, answer)
        return answer
