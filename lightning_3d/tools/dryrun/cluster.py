"""`World`: a simulated cluster for a script's Trainer, and modules whose parameters take no memory.

`Decision`: plans of the unsplit module, which the first simulated rank makes for all.
"""

import fcntl
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import nn

from lightning_3d.errors import ConfigurationError, RunError
from lightning_3d.module.torch_private import own_parameters, own_tensors
from lightning_3d.offload.offload_choice import NOTHING
from lightning_3d.parallel.parallel_plan import ParallelPlan, make_plan
from lightning_3d.tools.auto_layout import Decided, Situation, decide
from lightning_3d.tools.dryrun.fake_device import FakeDevice
from lightning_3d.tools.dryrun.report import DryRunReport
from lightning_3d.tools.planner.catalogue import CALIBRATED, Catalogue
from lightning_3d.tools.planner.hardware import Cluster

MOST_RANKS = 4096
_COUNTED = "h100"
"""The accelerator of a cluster that is given as a number of ranks."""


def parse_cluster(text: str) -> Cluster:
    """`128x8xh100`, `8xcpu`, or a number of ranks (of H100s)."""
    cluster = Catalogue.load().cluster(f"{text}x{_COUNTED}" if text.strip().isdecimal() else text)
    if not cluster.accelerator.runs_here:
        raise ConfigurationError(
            f"{cluster.accelerator.name} has prices, but lightning_3d does not run on it. Give a GPU or cpu."
        )
    if cluster.devices > MOST_RANKS:
        raise ConfigurationError(
            f"a dry run simulates clusters of up to {MOST_RANKS} ranks, and {text} has {cluster.devices}. More ranks on"
            " the data axis change only the size of shards: use a cluster with fewer nodes."
        )
    return cluster


class World:
    """One simulated cluster, and the dispatch mode that replaces its devices."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.pretend = cluster, FakeDevice()
        self.rank = 0
        self.ranks: Sequence[int] | None = None
        """Ranks to simulate; None for `usual_ranks`."""
        self.reports: list[DryRunReport] = []
        """One for each `fit`."""
        self.decisions = ""
        """Path of the file with the decisions of the first simulated rank, which the others read."""
        self.quiet = False
        """True where the caller shows the reports."""

    def show(self, report: DryRunReport) -> None:
        """Print the report of one `fit`, and raise if the real job would fail."""
        if self.quiet:
            return
        print(report)
        if report.errors:
            raise RunError(f"the job would fail: {report.errors[0]}")

    @property
    def streams(self) -> bool:
        """True where devices overlap work with streams and use the backend's own collectives, as GPUs do."""
        name = self.cluster.accelerator.name
        return name != "cpu" and (name != CALIBRATED or torch.cuda.is_available())

    def fake_parameters(self, module: nn.Module) -> None:
        """Replace real and meta parameters by fake ones, in place; tied ones stay tied. Buffers keep their values."""
        made: dict[int, nn.Parameter] = {}
        for held, name, tensor in own_tensors(module):
            if isinstance(tensor, nn.Parameter):
                held[name] = made.setdefault(id(tensor), self.fake_parameter(tensor))
            elif tensor.is_meta:
                held[name] = self.pretend.fake_like(tensor)

    def fake_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        if isinstance(parameter, self.pretend.kind):
            return parameter
        fake = nn.Parameter(self.pretend.fake_like(parameter), requires_grad=parameter.requires_grad)
        fake.__dict__.update({**parameter.__dict__, "lightning_3d_class": type(parameter)})
        return fake

    def kept_classes(self) -> Any:
        """Inside, a parameter of a class of its own that is made of a fake one keeps its class, as in a real job."""
        made: Any = nn.Parameter.__new__

        def new(kind: type, data: Any = None, requires_grad: bool = True) -> nn.Parameter:
            parameter: nn.Parameter = made(kind, data, requires_grad)
            if isinstance(parameter, self.pretend.kind):
                parameter.__dict__["lightning_3d_class"] = kind
            return parameter

        return patch.object(nn.Parameter, "__new__", new)


class Decision:
    """Decisions of the first simulated rank that needs one. The others wait for it, as real ranks do for rank 0.

    Every real rank runs the unsplit module on a batch to learn what its blocks do. The result is the same on all ranks,
    and takes longer than a training step of one stage.
    """

    def __init__(self, world: World) -> None:
        self.world, self.memory, self.calls = world, world.pretend.memory, world.pretend.calls

    def make_plan(self, *args: Any) -> ParallelPlan:
        """Nothing is copied to the host or a disk: the report takes it off by itself."""
        return replace(self._once("plan", lambda: make_plan(*args)), offload=NOTHING)

    def decide(self, situation: Situation) -> Decided:
        return self._once("layout", lambda: decide(replace(situation, cluster=self.world.cluster)))

    def _once(self, what: str, find: Callable[[], Any]) -> Any:
        with open(self.world.decisions, "r+b") as file:  # closing it unlocks it
            fcntl.flock(file, fcntl.LOCK_EX)
            decided = _decisions(file.read())
            if what not in decided:
                found, taken = self._measured(find)
                file.seek(0)
                file.write(_pickled({**decided, what: (found, taken)}))
                return found
        found, taken = decided[what]
        self.memory.peak = max(self.memory.peak, self.memory.live + taken)  # every real rank needs that memory
        return found

    def _measured(self, find: Callable[[], Any]) -> tuple[Any, int]:
        """The result of `find()`, and the memory that it needs. Its collectives do not count: the others skip them."""
        before, live, count = self.memory.restart(), self.memory.live, len(self.calls)
        found = find()
        del self.calls[count:]
        peak = self.memory.peak
        self.memory.peak = max(before, peak)
        return found, peak - live


def chosen_layout(path: str) -> Decided | None:
    """The layout that the simulated ranks have chosen; None if they failed before."""
    with open(path, "rb") as file:
        found: tuple[Decided, int] | None = _decisions(file.read()).get("layout")
    return None if found is None else found[0]


def _decisions(raw: bytes) -> dict[str, Any]:
    return pickle.loads(raw) if raw else {}


def _pickled(decisions: dict[str, Any]) -> bytes:
    """`decisions` without those that cannot be pickled (parts of a batch): each rank makes these itself."""
    while decisions:
        try:
            return pickle.dumps(decisions)
        except (pickle.PicklingError, TypeError, AttributeError):
            decisions = dict(list(decisions.items())[:-1])
    return b""


class FakeClusterEnvironment(LightningEnvironment):
    creates_processes_externally = True
    main_address, main_port = "127.0.0.1", 0

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def world_size(self) -> int:
        return self.world.cluster.devices

    def global_rank(self) -> int:
        return self.world.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: a simulated rank has its own number."""

    def local_rank(self) -> int:
        return self.world.rank % self.world.cluster.devices_per_node

    def node_rank(self) -> int:
        return self.world.rank // self.world.cluster.devices_per_node


def no_pointers() -> None:
    """Ignore torch's warning about addresses of fake tensors (all 0), which FSDP2 and deep copies compare."""
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")


def apply_to_fakes(apply: Any) -> Any:
    """`Module._apply` (`to`, `half` ...) that changes fake parameters in place. torch would replace the objects."""

    def apply_all(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        held = {name: parameter for name, parameter in own_parameters(module).items() if parameter is not None}
        fakes = {name: parameter for name, parameter in held.items() if isinstance(parameter, FakeDevice.kind)}
        for name in fakes:
            own_parameters(module)[name] = None
        apply(module, function, recurse)
        with torch.no_grad():
            for name, parameter in fakes.items():
                now = function(parameter)
                if now is not parameter:
                    parameter.data = now.data
                own_parameters(module)[name] = parameter
        return module

    return apply_all
