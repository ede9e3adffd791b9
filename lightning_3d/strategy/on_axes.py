"""The mesh and the groups of a run, and what is shared over its data axis."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.comm.config import CommConfig
from lightning_3d.launch.lightning_private import sync_ddp_if_available
from lightning_3d.layout import DATA_AXIS
from lightning_3d.ranks.groups import group_alone, open_groups, return_groups, sent_equally
from lightning_3d.ranks.users_group_private import UsersGroups, show_data_ranks
from lightning_3d.sandbox.first_batch import forget_reads
from lightning_3d.strategy.in_shards import InShards, shards_of
from lightning_3d.strategy.processes import Processes
from lightning_3d.zero.data_axis import DataAxis


class OnAxes(Processes):
    """Processes on the axes of a layout."""

    OF_PROCESS = (*Processes.OF_PROCESS, "_data_axis", "_in_shards")
    _data_axis: DataAxis | None = None
    _in_shards: InShards | None = None
    """What an earlier run has left of the module, which this run goes on with."""

    def __init__(self, **processes: Any) -> None:
        super().__init__(**processes)
        self._chooses = False
        """True where `setup` chooses the layout, from the module and its data. There is no mesh until then."""

    @property
    def data_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(DATA_AXIS)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.layout.data_parallel_size, "rank": self.coordinate.data}

    def setup_environment(self) -> None:
        self._in_shards = None
        super().setup_environment()
        self._in_shards = in_shards = shards_of(self._module)
        if in_shards is not None:
            self._check_reuse(in_shards)
            self._use_axes(in_shards.mesh, in_shards.data_axis)
        elif not self._chooses:
            self._open_axes()

    @abstractmethod
    def _check_reuse(self, in_shards: InShards) -> None:
        """Raise where this run cannot go on with a module that is in shards."""

    def _open_axes(self) -> None:
        """Open the mesh and the groups of the layout. Every rank must call it."""
        axes = open_groups(self.layout, self.global_rank, self.root_device.type, self._timeout)
        self._use_axes(axes.mesh, DataAxis(axes, self._comm_config(), streams=self._streams))

    def _use_axes(self, mesh: DeviceMesh, data_axis: DataAxis) -> None:
        self._mesh, self._data_axis = mesh, data_axis
        self._module._device_mesh = mesh
        if data_axis.axes.users is not None:
            self._undo.callback(show_data_ranks(data_axis.axes.users))
        self._choose_samplers()
        self._warn_of_world_size()

    @contextmanager
    def _users_alone(self) -> Iterator[None]:
        """Let the user's code see this rank only, before there is a layout."""
        alone = group_alone(self.global_rank)
        undo = show_data_ranks(UsersGroups(alone, alone))
        try:
            yield
        finally:
            undo()

    def _choose_samplers(self) -> None:
        """Keep the dataloaders' own samplers with one data rank.

        Lightning's sampler shuffles every dataloader of `fit`, also one whose author did not ask for it, and draws from
        another seed than on one device.
        """
        several = self.layout.data_parallel_size > 1 or self._shares_order
        self._module.trainer._accelerator_connector.use_distributed_sampler = self._wants_sampler and several

    @property
    def _streams(self) -> bool:
        """True where the backend overlaps communication by itself (CUDA). Else a thread of ours does."""
        return self.root_device.type != "cpu"

    @abstractmethod
    def _comm_config(self) -> CommConfig:
        """Settings of the data axis's communication."""

    @property
    def data_axis(self) -> DataAxis:
        assert self._data_axis is not None, "the data axis is open once the layout is chosen"
        return self._data_axis

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data axis, or over `group` if given: tensor and pipeline peers have the same values."""
        if not isinstance(tensor, Tensor) or self._mesh is None:
            return tensor
        if group is None:
            if self.layout.data_parallel_size == 1:
                return tensor
            group = self.data_group
        return sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    @abstractmethod
    def _moment(self) -> tuple[int, int] | None:
        """This rank's place in the run. None inside a step, whose messages may be under way."""

    def teardown(self) -> None:
        self._close_data_axis()
        if (trainer := getattr(self.lightning_module, "_trainer", None)) is not None:
            forget_reads(trainer)
        super().teardown()

    def _close_data_axis(self) -> None:
        if self._data_axis is None:
            return
        data_axis, self._data_axis = self._data_axis, None
        in_shards = shards_of(self._module)
        if in_shards is not None and in_shards.data_axis is data_axis:
            return  # a later run goes on with it
        data_axis.close()
        axes, moment = data_axis.axes, self._moment() if data_axis.engine.idle else None
        # after an error, even one of all ranks, one rank may have sent more messages than another
        if not self._judged or (not self._failed and sent_equally(axes, moment)):
            return_groups(axes)
