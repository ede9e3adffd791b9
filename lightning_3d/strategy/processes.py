"""The processes of one job as Lightning needs them: places, start, messages, failure."""

import sys
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import gcd
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.axes.group import Group
from lightning_3d.data.world_size_use import data_code_that_asks
from lightning_3d.extensions import simulating
from lightning_3d.faults import Watchdog, flight
from lightning_3d.faults.flight_recorder import put_aside
from lightning_3d.faults.nccl_settings import set_nccl_watchdog
from lightning_3d.launch import ScriptLauncher, SpawnLauncher, can_run_again, joined, store_of_attempt
from lightning_3d.launch.lightning_private import (
    Launcher,
    TunerExitException,
    default_process_group_backend,
    init_dist_connection,
    is_local_file_protocol,
)
from lightning_3d.layout import Coordinate, Layout
from lightning_3d.module.undo import UndoStack
from lightning_3d.ranks import rank_zero, talk
from lightning_3d.ranks.agreement import is_alone, is_communication
from lightning_3d.ranks.random_streams import share_seeded_state
from lightning_3d.strategy.checks import check_same_layout
from lightning_3d.strategy.registry import refuse_other_names

T = TypeVar("T")
StartMethod = Literal["auto", "popen", "spawn", "fork", "forkserver"]


class Processes(ParallelStrategy):
    """The part of `Strategy3D` about processes, whatever they compute."""

    OF_PROCESS: tuple[str, ...] = ("_mesh", "_watch", "_nodes")
    """Attributes that belong to a run in this process. A copy starts with their defaults, those of the class."""
    _mesh: DeviceMesh | None = None
    _watch: Watchdog | None = None
    _ran_before = False
    """True where an earlier run of this process left its process group."""
    _nodes: Sequence[int] = ()
    """The node of each rank, where the launcher started another number of processes than the Trainer has devices."""
    _wants_sampler = True
    """The user's `use_distributed_sampler`."""

    def __new__(cls, *args: Any, **arguments: Any) -> Any:
        refuse_other_names(arguments)  # before Python's own error, which does not know our name
        return super().__new__(cls)

    def __init__(
        self,
        *,
        timeout: timedelta | float,
        start_method: StartMethod,
        process_group_backend: str | None,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self._timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        self._start_method: StartMethod = start_method
        self._process_group_backend = process_group_backend
        self.num_nodes = 1  # the Trainer says how many
        self._undo = UndoStack()
        self._failed = self._judged = False
        self._shares_order = False
        """True where the saved run had several data ranks: the order of samples stays that of Lightning's sampler."""
        self._world_asked_by: str | None = None
        """The user's method that creates data and reads `trainer.world_size`."""
        self._world_warned = False
        self._dry_run: Launcher | None = None
        """Simulates the ranks of another cluster in place of this machine's."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in self.OF_PROCESS}

    def __repr__(self) -> str:
        """Shown by a Trainer of the separate `pytorch_lightning` package, which refuses other class trees."""
        return (
            f"<lightning_3d.{type(self).__name__} for Trainer of `lightning.pytorch`, not of `pytorch_lightning`:"
            " call lightning_3d.serve_pytorch_lightning() before anything imports that>"
        )

    # ---- who and where -------------------------------------------------------------------------------------------

    is_distributed = True
    """Lightning injects a DistributedSampler and honours `sync_dist=True` only where this is set."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """The layout for the number of processes there are."""

    @property
    def coordinate(self) -> Coordinate:
        return self.layout.coordinate(self.global_rank)

    @property
    def mesh(self) -> DeviceMesh:
        assert self._mesh is not None, "the mesh exists from setup_environment on"
        return self._mesh

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

    @property
    def process_group_backend(self) -> str | None:
        return self._process_group_backend

    @property
    def data_parallel_size(self) -> int:
        """Ranks that work on different samples. Divide a batch size by this, not by `trainer.world_size`."""
        return self.layout.data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """The share of the samples that this rank works on. Equal on tensor and pipeline peers."""
        return self.coordinate.data

    @property
    def world_size(self) -> int:
        asking = data_code_that_asks(sys._getframe(1))
        if asking is not None and self._world_asked_by is None:
            self._world_asked_by = asking
            self._warn_of_world_size()
        return super().world_size

    def _warn_of_world_size(self) -> None:
        """Warn once where user code divides its data over all ranks and some of them share their samples."""
        if self._world_asked_by is None or self._mesh is None or self._world_warned:
            return
        data, world = self.data_parallel_size, super().world_size
        if data != world:
            self._world_warned = True
            rank_zero_warn(
                f"{self._world_asked_by} reads trainer.world_size ({world}), but tensor and pipeline peers work on the"
                f" same samples: data is divided over {data} here. A batch size divided by the world size makes an"
                " optimizer step of fewer samples than you mean. Divide by trainer.strategy.data_parallel_size, and"
                " shard by trainer.strategy.data_parallel_rank."
            )

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # ---- environment ---------------------------------------------------------------------------------------------

    @property
    def _simulation(self) -> Launcher | None:
        return simulating[-1] if simulating else self._dry_run

    def _configure_launcher(self) -> None:
        if (simulation := self._simulation) is not None:
            self._launcher = simulation
            return
        assert self.cluster_environment is not None
        method, environment = self._start_method, self.cluster_environment
        if method == "auto":
            starts_none = environment.creates_processes_externally or self.num_processes * self.num_nodes == 1
            method = "popen" if starts_none or can_run_again() else "fork"
        if method == "popen":
            self._launcher = ScriptLauncher(environment, self.num_processes, self.num_nodes, self._guarded)
        else:
            self._launcher = SpawnLauncher(self, method, self._guarded)

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        trainer = self._module.trainer
        self._failed, self._judged, self._watch = False, False, None
        self._shares_order = False
        if vars(trainer).get("save_checkpoint") is _not_saved:
            del trainer.save_checkpoint  # an earlier run with this Trainer failed
        connector = trainer._accelerator_connector
        self._wants_sampler = connector.use_distributed_sampler
        self._undo.callback(setattr, connector, "use_distributed_sampler", self._wants_sampler)
        super().setup_environment()
        self.set_world_ranks()
        self._process_group_backend = self._process_group_backend or default_process_group_backend(self.root_device)
        set_nccl_watchdog(self._process_group_backend, flight_folder(trainer.default_root_dir))
        assert self.cluster_environment is not None
        on_device = self.root_device.type != "cpu" and self._process_group_backend != "gloo"  # which splits no groups
        device = self.root_device if on_device else None
        options: dict[str, Any] = {"timeout": self._timeout, "device_id": device}
        self._ran_before = dist.is_initialized()
        if not self._ran_before and self._process_group_backend != "fake":
            options |= store_of_attempt(self.cluster_environment, self.global_rank, self.world_size, self._timeout)
        init_dist_connection(self.cluster_environment, self._process_group_backend, **options)
        self._watch = self._start_watch()
        share_seeded_state()
        self._nodes = self._find_nodes()
        self._before_layout()
        if self.local_rank == 0 and dist.get_backend() != "fake":
            self._move_old_records()
        layout = check_same_layout(lambda: self.layout, self.world_size)
        if self._watch is not None:
            self._watch.places = {rank: str(layout.coordinate(rank)) for rank in range(self.world_size)}
        self._mesh = None

    def _find_nodes(self) -> Sequence[int]:
        """Empty where each node has as many ranks as the Trainer has devices. Collective elsewhere."""
        size = dist.get_world_size()
        if size in (1, self.num_processes * self.num_nodes) or size != self.world_size:  # the last is refused later
            return ()
        return talk.gather(self.node_rank)

    def _before_layout(self) -> None:
        """Prepare what the layout depends on. Called once processes can send messages."""

    # ---- talk ----------------------------------------------------------------------------------------------------

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from every rank of the world, on all axes, or from `group` if given."""
        rank_zero.refuse_where_local("an all_gather")
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        return super().all_gather(tensor, group, sync_grads)

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

    # ---- fail -----------------------------------------------------------------------------------------------------

    def _start_watch(self) -> Watchdog | None:
        """Watch the ranks from the start, although their places are not known yet."""
        flight.clear()
        if Group().silent:
            return None  # there is no other process
        places = dict.fromkeys(range(dist.get_world_size()), "its place is not known yet")
        folder = flight_folder(self._module.trainer.default_root_dir)
        return Watchdog(self.global_rank, places, timeout=self._timeout.total_seconds(), folder=folder)

    def _move_old_records(self) -> None:
        try:
            put_aside(flight_folder(self._module.trainer.default_root_dir))
        except OSError as error:
            warnings.warn(
                f"Flight records of an earlier run cannot be moved, and this run writes to the same folder: {error}",
                stacklevel=2,
            )

    def _guarded(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call the Trainer's `function`. Explain an error that another rank caused, before any callback gets it."""
        try:
            return function(*args, **kwargs)
        except _NO_FAILURES:
            raise
        except BaseException as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error

    def _explained(self, error: BaseException) -> BaseException:
        """The error to raise for `error`, once all ranks know of it."""
        own, interrupted = not is_communication(error), isinstance(error, KeyboardInterrupt)
        explained = self._watch.explained(error) if self._watch is not None else error
        elsewhere = is_alone(error) or (interrupted and self.world_size > 1)  # Ctrl-C stops each rank elsewhere
        self._fail(own_error=not elsewhere)
        if own and self._failed and self._watch is not None and not interrupted:
            self._watch.record(f"{type(error).__name__}: {error}", flight.failing(error))
        return explained

    def _fail(self, *, own_error: bool) -> None:
        """Find out if all ranks fail alike. If not, no collective may be tried any more."""
        self._judged, self._failed = True, not talk.failed_everywhere(own_error)
        module = self.lightning_module
        if self._failed and module is not None and module._trainer is not None:
            module.trainer.save_checkpoint = _not_saved  # type: ignore[method-assign]

    def on_exception(self, exception: BaseException) -> None:
        if not self._judged:
            self._fail(own_error=not is_alone(exception))
        if self._failed:
            if self._watch is not None:
                self._watch.linger()
                self._watch.close(ended=False)
            talk.leave()

    def teardown(self) -> None:
        if self._failed:
            return  # the module stays sharded, and cannot be moved to the CPU
        if self._watch is not None:
            self._watch.close(ended=True)
            self._watch = None
        super().teardown()


_NO_FAILURES = (TunerExitException, SIGTERMException, GeneratorExit)
"""Lightning's own ways to end a run, at the same place on all ranks."""


def flight_folder(run: str) -> Path:
    """The folder for the flight records of a run, on this machine where the run writes to a bucket."""
    return (Path(run) if is_local_file_protocol(run) else Path.cwd()) / "flight"


def _not_saved(filepath: Any, *_: Any, **__: Any) -> None:
    """Stands in for `trainer.save_checkpoint` once a rank is missing: some callbacks save when training fails."""
    rank_zero_warn(f"{filepath} is not saved: it needs the shards of other ranks, which have ended.")
