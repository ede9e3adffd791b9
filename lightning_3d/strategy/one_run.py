"""`Run`: one run of a Trainer in this process."""

import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_3d.errors import UnsupportedError
from lightning_3d.faults import Preemption, Watchdog, flight
from lightning_3d.faults.flight_recorder import put_aside
from lightning_3d.launch.lightning_private import TunerExitException, is_local_file_protocol, trainer_of
from lightning_3d.layout import DATA_AXIS, Coordinate, Layout
from lightning_3d.module.undo import UndoStack
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.parallel.parallel_plan import ParallelPlan
from lightning_3d.precision import Precision3D
from lightning_3d.ranks import talk
from lightning_3d.ranks.agreement import is_alone, is_communication
from lightning_3d.strategy.fit_report import FitReport
from lightning_3d.strategy.in_shards import InShards
from lightning_3d.strategy.run_note import SavedRun
from lightning_3d.strategy.settings import Settings
from lightning_3d.strategy.steps import CheckedSteps
from lightning_3d.zero import DataParallel
from lightning_3d.zero.data_axis import DataAxis

NO_FAILURES = (TunerExitException, SIGTERMException, GeneratorExit)
"""Lightning's own ways to end a run, at the same place on all ranks."""


class Failure:
    """The failure of a run, if there is one, and the watch over its ranks. A copy has neither."""

    def __init__(self) -> None:
        self.watch: Watchdog | None = None
        self.judged = False
        """True once this rank has failed."""
        self.alone = False
        """True where not all ranks have failed alike: no collective may be tried any more."""

    def __reduce__(self) -> Any:
        return Failure, ()

    def start_watch(self, rank: int, timeout: timedelta, folder: Path) -> None:
        """Watch the ranks from the start, although their places are not known yet."""
        flight.clear()
        if dist.get_world_size() == 1 or talk.job_store() is None:
            return  # there is no other process
        places = dict.fromkeys(range(dist.get_world_size()), "its place is not known yet")
        self.watch = Watchdog(rank, places, timeout=timeout.total_seconds(), folder=folder)

    def name_places(self, layout: Layout) -> None:
        """Let messages name ranks by their places in `layout`."""
        if self.watch is not None:
            self.watch.places = {rank: str(layout.coordinate(rank)) for rank in range(layout.world_size)}

    def explained(self, error: BaseException, module: LightningModule | None, world_size: int) -> BaseException:
        """The error to raise for `error`, once all ranks know of it."""
        own, interrupted = not is_communication(error), isinstance(error, KeyboardInterrupt)
        explained = self.watch.explained(error) if self.watch is not None else error
        elsewhere = is_alone(error) or (interrupted and world_size > 1)  # Ctrl-C stops each rank elsewhere
        self._judge(module, own_error=not elsewhere)
        if own and self.alone and self.watch is not None and not interrupted:
            self.watch.record(f"{type(error).__name__}: {error}", flight.failing(error))
        return explained

    def _judge(self, module: LightningModule | None, *, own_error: bool) -> None:
        """Find out if all ranks fail alike."""
        self.judged, self.alone = True, not talk.failed_everywhere(own_error)
        if self.alone and module is not None and trainer_of(module) is not None:
            module.trainer.save_checkpoint = _not_saved  # type: ignore[method-assign]

    def end(self, error: BaseException, module: LightningModule | None) -> None:
        """End the run with `error`. A rank that fails alone leaves the others once they know the reason."""
        if not self.judged:
            self._judge(module, own_error=not is_alone(error))
        if self.alone:
            if self.watch is not None:
                self.watch.linger()
                self.watch.close(ended=False)
            talk.leave()

    def close(self) -> None:
        """End the watch after a run that this rank does not fail alone."""
        if self.watch is not None:
            self.watch.close(ended=True)
            self.watch = None


def flight_folder(run: str) -> Path:
    """The folder for the flight records of a run, on this machine where the run writes to a bucket."""
    return (Path(run) if is_local_file_protocol(run) else Path.cwd()) / "flight"


def move_old_records(folder: Path) -> None:
    """Move flight records of an earlier run out of `folder`."""
    try:
        put_aside(folder)
    except OSError as error:
        warnings.warn(
            f"Flight records of an earlier run cannot be moved, and this run writes to the same folder: {error}",
            stacklevel=2,
        )


def let_save(trainer: Trainer) -> None:
    """Let `trainer` save again after a run that failed."""
    if vars(trainer).get("save_checkpoint") is _not_saved:
        del trainer.save_checkpoint


def _not_saved(filepath: Any, *_: Any, **__: Any) -> None:
    """Stands in for `trainer.save_checkpoint` once a rank is missing: some callbacks save when training fails."""
    rank_zero_warn(f"{filepath} is not saved: it needs the shards of other ranks, which have ended.")


@dataclass(kw_only=True, eq=False)
class Run:
    """A run of a Trainer: `setup_environment` makes it, `teardown` drops it. No copy of a strategy has it."""

    trainer: Trainer
    module: LightningModule
    settings: Settings
    plugin: Precision3D
    device: torch.device
    rank: int
    streams: bool
    """True where the backend overlaps communication by itself (CUDA). Else a thread of ours does."""
    failure: Failure
    follows_another: bool
    """True where an earlier run of this process left its process group."""
    wants_sampler: bool = True
    """The user's `use_distributed_sampler`."""
    undo: UndoStack = field(default_factory=UndoStack)
    """Puts back what the run changes in the module, in torch and in Lightning."""

    earlier: SavedRun | None = None
    shares_order: bool = False
    """True where the saved run had several data ranks: the order of samples stays that of Lightning's sampler."""
    in_shards: InShards | None = None
    """What an earlier run has left of the module, which this run goes on with."""
    stays_in_shards: bool = False

    layout: Layout | None = None
    """None until it is chosen."""
    opened: DataAxis | None = None
    """None until the layout is chosen."""
    preemption: Preemption | None = None
    plan: ParallelPlan | None = None
    parallel: ParallelModule | None = None
    """None until the module is placed."""
    report: FitReport | None = None
    """None without a fit."""
    steps: CheckedSteps | None = None
    """None until the end of `setup`."""
    optimizers: list[Optimizer] = field(default_factory=list)
    step: str = ""
    """Name of the user's step that runs, empty between steps."""
    broke: bool = False
    """True where a step has raised: messages of its stages may be under way."""
    data_read: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Parameters of which the step has read `.data`, each with what it got."""

    def stepping(self, optimizer: Optimizer) -> "Run":
        if optimizer not in self.optimizers:
            raise UnsupportedError(
                f"trainer.optimizers was set to another optimizer ({type(optimizer).__name__}). Its states would stay"
                " shards, also in checkpoints, and lack those of other stages. Let configure_optimizers return it, and"
                " call trainer.strategy.setup_optimizers(trainer) where it begins."
            )
        return self

    @property
    def fitting(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING

    @property
    def verifies_first(self) -> bool:
        """True where the first step is compared with that of the unsplit module."""
        return self.fitting and self.settings.verify == "first_step"

    @property
    def callbacks(self) -> Any:
        return self.trainer.callbacks  # type: ignore[attr-defined]

    @property
    def chosen(self) -> Layout:
        assert self.layout is not None, "the layout is chosen at the start of setup"
        return self.layout

    @property
    def place(self) -> Coordinate:
        return self.chosen.coordinate(self.rank)

    @property
    def data_axis(self) -> DataAxis:
        assert self.opened is not None, "the data axis is open once the layout is chosen"
        return self.opened

    @property
    def mesh(self) -> DeviceMesh:
        return self.data_axis.axes.mesh

    @property
    def data_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(DATA_AXIS)

    @property
    def peer_groups(self) -> list[dist.ProcessGroup]:
        return [self.mesh.get_group(axis) for axis in self.chosen.peer_axes]

    @property
    def placed(self) -> ParallelModule:
        assert self.parallel is not None, "the module is placed from setup on"
        return self.parallel

    @property
    def data(self) -> DataParallel:
        return self.parallel.data if self.parallel is not None else DataParallel()

    @property
    def running(self) -> CheckedSteps:
        assert self.steps is not None, "steps are prepared at the end of setup"
        return self.steps

    @property
    def reporting(self) -> FitReport:
        assert self.report is not None, "a fit has a report from setup on"
        return self.report

    def close(self) -> None:
        """Put back what the run has changed, before its axes are closed."""
        self.undo.close()
        if self.preemption is not None:
            self.preemption.close()
