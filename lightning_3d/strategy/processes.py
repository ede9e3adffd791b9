"""The processes of one job as Lightning sees them: who is where, how they start, talk and fail."""

import sys
import traceback
import warnings
from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.comm.config import CommConfig
from lightning_3d.data.world_size_use import data_code_that_asks
from lightning_3d.errors import LayoutError, Lightning3DError, RunError
from lightning_3d.faults import Watchdog, flight
from lightning_3d.faults.flight_recorder import put_aside
from lightning_3d.faults.verdict import is_communication
from lightning_3d.launch import ScriptLauncher, SpawnLauncher, can_run_again, joined, store_of_attempt
from lightning_3d.layout import DATA_AXIS, Coordinate, Layout
from lightning_3d.ranks import rank_zero, talk
from lightning_3d.ranks.groups import has_peers, in_step, open_groups, return_groups
from lightning_3d.ranks.random_streams import share_seeded_state
from lightning_3d.strategy.checks import check_same_layout
from lightning_3d.zero.data_axis import DataAxis


def keep_own_samplers(trainer: Trainer) -> Callable[[], None]:
    """Have Lightning leave the samplers of dataloaders alone; returns what undoes it.

    For one data rank. The sampler that Lightning would put there shuffles every dataloader of `fit`, also one whose
    author did not ask for it, and draws from another seed than on one device.
    """
    connector = trainer._accelerator_connector
    wanted, connector.use_distributed_sampler = connector.use_distributed_sampler, False
    return lambda: setattr(connector, "use_distributed_sampler", wanted)


T = TypeVar("T")
StartMethod = Literal["auto", "popen", "spawn", "fork", "forkserver"]


class Processes(ParallelStrategy):
    """What `Strategy3D` needs of its processes, whatever they compute."""

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
        self._mesh: DeviceMesh | None = None
        self._communication: DataAxis | None = None
        self._failed = self._judged = False
        self._watch: Watchdog | None = None
        self._give_samplers_back: Callable[[], None] = _nothing
        self._shares_order = False
        """Whether the run had several data ranks when it was saved: then it goes on in the order of Lightning's."""
        self._world_asked_by: str | None = None
        """Method of the user's that makes data and read `trainer.world_size`."""
        self._world_warned = False
        self._chooses = False
        """Whether the layout is chosen in `setup`, once module and data are there; there is no mesh until then."""

    def __repr__(self) -> str:
        """Shown by a Trainer of the separate `pytorch_lightning` package, which refuses every other class tree."""
        return f"<lightning_3d.{type(self).__name__} for Trainer of `lightning.pytorch`, not of `pytorch_lightning`>"

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
    def data_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(DATA_AXIS)

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:  # type: ignore[override]
        """Who started the processes; what Lightning does not know of is recognised here."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, environment: ClusterEnvironment | None) -> None:
        self._cluster_environment = joined(environment)

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        return self._process_group_backend

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.layout.data_parallel_size, "rank": self.coordinate.data}

    @property
    def data_parallel_size(self) -> int:
        """Ranks that work on different samples: by this a batch size is divided, not by `trainer.world_size`."""
        return self.layout.data_parallel_size

    @property
    def data_parallel_rank(self) -> int:
        """Which of the parts of the samples this rank works on; equal on tensor and pipeline peers."""
        return self.coordinate.data

    @property
    def world_size(self) -> int:
        asking = data_code_that_asks(sys._getframe(1))
        if asking is not None and self._world_asked_by is None:
            self._world_asked_by = asking
            self._warn_of_world_size()
        return super().world_size

    def _warn_of_world_size(self) -> None:
        """Warn once of data that is divided by all ranks, where some of them share their samples."""
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

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        method, environment = self._start_method, self.cluster_environment
        if method == "auto":
            method = "popen" if can_run_again() or environment.creates_processes_externally else "fork"
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
        self._failed, self._judged, self._watch = False, False, None
        self._shares_order = False
        if vars(self._module.trainer).get("save_checkpoint") is _not_saved:
            del self._module.trainer.save_checkpoint  # an earlier run with this Trainer failed
        super().setup_environment()
        self.set_world_ranks()
        self._process_group_backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        assert self.cluster_environment is not None
        device = self.root_device if self.root_device.type != "cpu" else None
        options: dict[str, Any] = {"timeout": self._timeout, "device_id": device}
        if not dist.is_initialized() and self._process_group_backend != "fake":
            options |= store_of_attempt(self.cluster_environment, self.global_rank, self.world_size, self._timeout)
        _init_dist_connection(self.cluster_environment, self._process_group_backend, **options)
        share_seeded_state()
        self._before_layout()
        if self.local_rank == 0 and dist.get_backend() != "fake":
            self._put_records_aside()
        layout = check_same_layout(self._layout_or_error(), self.world_size)
        self._watch = self._start_watch(layout)
        self._mesh = None
        if not self._chooses:
            self._open_axes()

    def _open_axes(self) -> None:
        """Groups and mesh of the layout. Every rank must call it."""
        axes = open_groups(self.layout, self.global_rank, self.root_device.type, self._timeout)
        self._mesh, self._communication = axes.mesh, DataAxis(axes, self._comm_config(), streams=self._streams)
        self._module._device_mesh = self._mesh
        self._settle_samplers()
        self._warn_of_world_size()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_give_samplers_back": _nothing}  # those of this process's trainer

    def _settle_samplers(self) -> None:
        self._give_samplers_back()
        self._give_samplers_back = _nothing
        if self.layout.data_parallel_size == 1 and not self._shares_order:
            self._give_samplers_back = keep_own_samplers(self._module.trainer)

    def _before_layout(self) -> None:
        """What has to be settled once processes can talk and before the layout is."""

    @property
    def _streams(self) -> bool:
        """Whether the backend overlaps communication by itself (CUDA), so that it needs no thread of ours."""
        return self.root_device.type != "cpu"

    @abstractmethod
    def _comm_config(self) -> CommConfig:
        """How the data axis communicates."""

    def _layout_or_error(self) -> Layout | LayoutError:
        try:
            return self.layout
        except LayoutError as error:
            return error

    @property
    def _sending(self) -> DataAxis:
        assert self._communication is not None, "communication exists from setup_environment on"
        return self._communication

    def from_rank_zero(self, decide: Callable[[], T]) -> T:
        """What `decide()` returns on rank 0, on every rank; what it raises there, too."""
        box: list[Any] = [None, None]
        if self.global_rank == 0:
            try:
                box[0] = decide()
            except Lightning3DError as error:
                box[1] = error
            except Exception as error:
                box[1] = RunError(f"rank 0: {type(error).__name__}: {error}")  # the original may not travel
                traceback.print_exc()
        box = talk.from_first(box)
        if box[1] is not None:
            raise box[1]
        return box[0]  # type: ignore[no-any-return]

    # ---- talk ----------------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data axis, or over `group` if given: tensor and pipeline peers hold the same values."""
        if not isinstance(tensor, Tensor) or self._mesh is None:
            return tensor
        if group is None:
            if self.layout.data_parallel_size == 1:
                return tensor
            group = self.data_group
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Over every rank of the world, whatever axis it is on."""
        if not dist.is_initialized():
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return int(votes) == self.world_size if all else int(votes) > 0

    @property
    def is_global_zero(self) -> bool:
        return rank_zero.is_zero(self.global_rank)

    def barrier(self, name: str | None = None) -> None:
        if rank_zero.is_alone():
            rank_zero.refuse("a barrier")
        if dist.is_initialized():
            ids = [self.root_device.index] if dist.get_backend() == "nccl" else None
            dist.barrier(device_ids=ids)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        if rank_zero.is_alone():
            return rank_zero.heard(obj)
        heard = talk.from_first(obj, first=src)
        if src == 0:
            rank_zero.hear(obj, heard)
        return heard

    # ---- fail -----------------------------------------------------------------------------------------------------

    def _start_watch(self, layout: Layout) -> Watchdog | None:
        flight.clear()
        if self.world_size == 1 or not has_peers():
            return None  # no other process is there
        places = {rank: str(layout.coordinate(rank)) for rank in range(self.world_size)}
        folder = flight_folder(self._module.trainer.default_root_dir)
        return Watchdog(self.global_rank, places, timeout=self._timeout.total_seconds(), folder=folder)

    def _put_records_aside(self) -> None:
        try:
            put_aside(flight_folder(self._module.trainer.default_root_dir))
        except OSError as error:
            warnings.warn(f"Flight records of an earlier run stay where those of this one go: {error}", stacklevel=2)

    def _guarded(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call what the Trainer runs; an error that another rank caused says so, before any callback hears of it."""
        try:
            return function(*args, **kwargs)
        except _NO_FAILURES:
            raise
        except BaseException as error:
            told = self._told(error)
            if told is error:
                raise
            raise told from error

    def _told(self, error: BaseException) -> BaseException:
        """What to raise for `error`, after all ranks know of it."""
        own, interrupted = not is_communication(error), isinstance(error, KeyboardInterrupt)
        told = self._watch.explained(error) if self._watch is not None else error
        self._fail(in_step=own and (not interrupted or self.world_size == 1))  # Ctrl-C meets each rank elsewhere
        if own and self._failed and self._watch is not None and not interrupted:
            self._watch.record(f"{type(error).__name__}: {error}", flight.failing(error))
        return told

    def _fail(self, *, in_step: bool) -> None:
        """Find out whether all ranks fail alike; if not, nothing that takes all of them may be tried any more."""
        self._judged, self._failed = True, not talk.failed_everywhere(in_step)
        module = self.lightning_module
        if self._failed and module is not None and module._trainer is not None:
            module.trainer.save_checkpoint = _not_saved  # type: ignore[method-assign]

    def on_exception(self, exception: BaseException) -> None:
        if not self._judged:
            self._fail(in_step=not is_communication(exception))
        if self._failed:
            if self._watch is not None:
                self._watch.linger()
                self._watch.close(ended=False)
            talk.leave()

    def teardown(self) -> None:
        self._give_samplers_back()
        self._give_samplers_back = _nothing
        self._close_communication()
        if self._failed:
            return  # what is in parts stays so, and cannot be moved to the CPU
        if self._watch is not None:
            self._watch.close(ended=True)
            self._watch = None
        super().teardown()

    @abstractmethod
    def _moment(self) -> tuple[int, int] | None:
        """Where in the run this rank is, None inside of a step whose messages may be under way."""

    def _close_communication(self) -> None:
        if self._communication is not None:
            self._communication.close()
            axes, moment = self._communication.axes, self._moment() if self._communication.engine.idle else None
            # after an error, of all ranks even, one may have sent more than another
            if not self._judged or (not self._failed and in_step(axes, moment)):
                return_groups(axes)
            self._communication = None


_NO_FAILURES = (_TunerExitException, SIGTERMException, GeneratorExit)
"""How Lightning itself ends a run, at the same place on all ranks."""


def _nothing() -> None:
    """In place of what undoes something where nothing was done."""


def flight_folder(run: str) -> Path:
    """Where the flight records of a run are; of one that lives in a bucket they stay here."""
    return (Path(run) if _is_local_file_protocol(run) else Path.cwd()) / "flight"


def _not_saved(filepath: Any, *_: Any, **__: Any) -> None:
    """In place of `trainer.save_checkpoint` once a rank is missing, for callbacks that save when training fails."""
    rank_zero_warn(f"{filepath} is not saved: the other ranks, which hold parts of it, are not there any more.")
