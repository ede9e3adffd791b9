"""The surroundings of a pipelined step: the cut module, callbacks of other layers, one run of the user's code."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch import distributed as dist

from lightning_3d.axes.ledger import Ledger
from lightning_3d.errors import NO_PIPELINE, UnsupportedError
from lightning_3d.launch.lightning_private import trainer_of
from lightning_3d.layout import stage_ranks
from lightning_3d.module.operation_count import ShownOperations
from lightning_3d.module.undo import UndoStack, do_nothing
from lightning_3d.pipeline.across_samples import LeftOut
from lightning_3d.pipeline.gates import Gates
from lightning_3d.pipeline.loss_mean import Mixing, rounding_of
from lightning_3d.pipeline.microbatch import Rows, signature
from lightning_3d.pipeline.pass_clock import PassClock
from lightning_3d.pipeline.rehearsal import StepTrace
from lightning_3d.pipeline.schedule import stages_per_rank
from lightning_3d.pipeline.split import PipelineSplit
from lightning_3d.pipeline.wire import Wire
from lightning_3d.ranks import random_streams, talk
from lightning_3d.sandbox.first_batch import promised_samples
from lightning_3d.sandbox.log_recorder import LogRecorder
from lightning_3d.sandbox.trees import unshared


def check_automatic(module: Any, *, cut: bool = True) -> None:
    """Raise `UnsupportedError` for manual optimization (a GAN), sparse gradients, and some of `cut` batches."""
    for name, inner in module.named_modules():
        if cut and isinstance(inner, nn.Embedding | nn.EmbeddingBag) and inner.scale_grad_by_freq:
            raise UnsupportedError(
                f"{name} divides the gradient of each row by how often the batch has it (scale_grad_by_freq=True), and"
                " each microbatch would divide by its own counts. num_microbatches=1 runs the full batch at once."
            )
        if getattr(inner, "sparse", False) is True and isinstance(inner, nn.Embedding | nn.EmbeddingBag):
            raise UnsupportedError(
                f"{name} has sparse gradients (sparse=True), which stages can neither compare nor sum. Use"
                f" sparse=False, with which SGD and Adagrad take the same steps, or {NO_PIPELINE}."
            )
        if inner is not module and type(inner).state_dict is not nn.Module.state_dict:
            trained = {each for each, item in inner.named_parameters() if item.requires_grad}
            for left in trained - inner.state_dict().keys():
                raise UnsupportedError(
                    f"{name} ({type(inner).__name__}) leaves its parameter {left!r} out of its state_dict() until it"
                    " has run. Blocks of other stages never run on a rank, so checkpoints would lack trained weights."
                    f" Use {NO_PIPELINE}."
                )
    if "dataloader_iter" in inspect.signature(getattr(module, "training_step", module.forward)).parameters:
        raise UnsupportedError(
            "training_step(dataloader_iter) takes its batch itself, and a pipeline must cut it before. Use"
            f" training_step(batch, batch_idx), or {NO_PIPELINE}."
        )
    if not getattr(module, "automatic_optimization", True):
        raise UnsupportedError(
            "Manual optimization cannot run under a pipeline: the backward of a microbatch starts before training_step"
            f" has run for the next one. Use automatic optimization, or {NO_PIPELINE}."
        )


def check_supported(module: Any, optimizers: Sequence[torch.optim.Optimizer], callbacks: Sequence[Callback]) -> None:
    """Raise `UnsupportedError` for optimizers that evaluate the loss several times.

    Warns of an overridden `backward` or `on_before_backward`, which may do nothing that matters.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                f"{type(optimizer).__name__} evaluates the loss several times per step from flattened parameters, of"
                f" which a rank has those of its stage. Use another optimizer, or {NO_PIPELINE}."
            )
    owners = [each for each in (module, *callbacks) if isinstance(each, LightningModule | Callback)]
    late = [(each, name) for each in owners for name in ("backward", "on_before_backward") if hasattr(each, name)]
    for owner, name in late:
        if is_overridden(name, owner):
            rank_zero_warn(
                f"{type(owner).__name__}.{name} is called under a pipeline once the gradients are there: what it does"
                " to the loss, or freezes, comes too late. Do it in training_step; freeze in on_train_batch_start."
            )


@dataclass
class StepCallbacks:
    """Callbacks of the ZeRO and precision layers around a pipelined step.

    No step is registered as a forward method, because a cut step never reaches the root's hook after it. Parameters
    must be sharded again whenever a training step begins, because older gradients are dropped then.
    """

    begin: Callable[[], None] = do_nothing
    """Before the schedule: parameters gathered, no reduction of gradients in backward."""
    reduce: Callable[[], None] = do_nothing
    """After the schedule, on the last batch of an accumulation window: gradients reduced over data ranks."""
    grad_holder: Callable[[str], Tensor] | None = None
    """The tensor whose `.grad` is the gradient of a parameter before its reduction, by name; for tied parameters."""
    peers: Sequence[dist.ProcessGroup] = ()
    """Groups of the ranks on other axes that run the same batches with this one."""
    evaluating: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around an evaluation step: parameters gathered inside, sharded again after it."""
    rehearsing: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around a backward ahead of training: gradients stay at the parameters, and can be put back."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around each call of a step on a microbatch (autocast)."""


@dataclass(eq=False, repr=False)
class CutModule:
    """A module that `apply_split` has cut, on the ranks of one pipeline, and what is known of its steps."""

    module: Any
    split: PipelineSplit
    group: dist.ProcessGroup
    _: KW_ONLY
    device: torch.device | None = None
    """It has the activations."""
    schedule: str = "1f1b"
    num_microbatches: int | Literal["auto"] = "auto"
    """Pieces of a batch; fewer where a batch has fewer rows."""
    loss_scope: Literal["microbatch", "batch"] = "microbatch"
    """"batch" computes head and loss once on the full batch, for losses that are no mean over samples. All forwards run
    before all backwards then, whatever `schedule` says."""
    mixing: Mixing | None = None
    """The first call of a block that a microbatch gives other values for. With "batch" the head must have it."""
    left_out: LeftOut = field(default_factory=LeftOut)
    given: bool | None = None
    """True while the first block gets a tensor of the batch itself; None before the first step, False for good."""
    alike: tuple[str, ...] = ()
    """See `carried_state.alike_on_parts`."""
    together: dist.ProcessGroup | None = None
    """Data ranks that run their blocks equally often, since tokens travel between them."""
    ledger: Ledger = field(default_factory=Ledger)
    rows: Rows | None = None
    traces: dict[Any, StepTrace] = field(default_factory=dict)
    """By `StepContext.key`."""
    in_one_piece: set[int] = field(default_factory=set)
    """Stages whose backward must not run in two halves."""
    proven: dict[Any, frozenset[str]] = field(default_factory=dict)
    """By pattern of a proven trace: the parameters that the loss does not depend on."""
    by_step: bool = False
    """True where steps on equal shapes run other blocks: each is rehearsed."""
    clock: PassClock | None = None
    """Times the passes of training steps, where somebody asks for them."""
    takes: bool = False
    """True where what the user's hooks take inside of blocks travels with the outputs: see `Gates`."""
    ends: set[Any] = field(default_factory=set)
    """Nodes of autograd of the outputs of blocks, in the run of the last stage."""
    shown: dict[int, ShownOperations] = field(default_factory=dict)
    """Of each part that runs here, by its first call."""
    is_mean: bool = False
    """True where the loss was found to be a mean over samples, with the first batch."""
    losses: dict[Any, tuple[Any, set[str]]] = field(default_factory=dict)
    """By `trained`: the first step, and the kinds of nodes between these and its loss."""
    checked_heads: set[Any] = field(default_factory=set)
    """Patterns of traces whose head is known to use no random numbers that are drawn before it."""

    def __post_init__(self) -> None:
        self.last_stage = self.split.num_stages - 1
        self.wire = Wire(self.group, self.device or torch.device("cpu"), self.ledger)
        self.per_rank = stages_per_rank(self.schedule, self.split.num_stages // self.wire.size)
        self.placement = self.schedule, self.wire.size, self.per_rank
        self.stage_rank = stage_ranks(*self.placement)
        self.my_stages = self.split.stages_on(self.wire.rank, self.wire.size, self.schedule)
        self.find_trained()

    def open(self, hooks: StepCallbacks, undo: UndoStack) -> None:
        """Put the gates on the module until `undo` closes. Tensor layers and FSDP put their hooks on it before."""
        self.hooks, units = hooks, list(self.split.holders)
        absent = [unit for unit in units if not set(self.split.holders[unit]) & set(self.my_stages)]
        self.gates = Gates(self.module, units, absent, undo)
        self.gates.takes = self.takes
        self.recorder = LogRecorder(self.module, self.gates.inside_block)

    def check_shapes(self, shapes: Any) -> None:
        """Raise where ranks of `together` have batches of other shapes: each would rehearse them by itself."""
        if self.together is not None and not talk.all_equal(shapes, self.together):
            raise UnsupportedError(
                "Data ranks have batches of unequal shapes. Stages of a pipeline run each new shape once more, to"
                " compare, and with expert_parallel_size the other data ranks would wait for tokens of that run. Pad"
                f" all batches of a step to one length, or use expert_parallel_size=1 or {NO_PIPELINE}."
            )

    def find_trained(self) -> None:
        """Note which parameters get a gradient: callbacks freeze and unfreeze them between steps."""
        self.trained = tuple(parameter.requires_grad for parameter in self.module.parameters())

    @property
    def owns_last(self) -> bool:
        return self.stage_rank[-1] == self.wire.rank

    @property
    def rounding(self) -> float:
        """The largest difference, relative to them, of numbers that two runs of the same code give."""
        return rounding_of(self.module, context=self.hooks.context)

    @property
    def acts_as_rank_zero(self) -> bool:
        """True on the rank that does what a step does on rank 0 only: the last stage of the pipeline of rank 0."""
        return self.owns_last and dist.get_global_rank(self.wire.group, 0) == 0

    def rows_of(self, batch: Any) -> Rows:
        """The places of the samples in a batch, decided on the first batch, which is full."""
        if self.rows is None:
            trainer = trainer_of(self.module)
            expected = None if trainer is None else promised_samples(trainer.train_dataloader)
            self.rows = Rows.of(batch, expected, self.module)
        return self.rows

    def stage_parameters(self, stage: int) -> list[Tensor]:
        units = [unit for unit, stages in self.split.holders.items() if stage in stages]
        found = [item for unit in units for item in self.module.get_submodule(unit).parameters()]
        found += [self.module.get_parameter(name) for name in self.split.everywhere]
        return list({id(item): item for item in found if item.requires_grad}.values())


@dataclass(frozen=True)
class StepContext:
    """One run of the user's step, on the full batch or on a microbatch."""

    pipeline: CutModule
    name: str
    args: tuple[Any, ...]
    seed: int
    real: bool = False
    """True in training. In a rehearsal, code of the step for rank 0 only does not run."""
    earlier: int | None = None
    """The seed of random numbers that are drawn before a part of the step, if it is another one."""
    draws: bool = True
    """False to raise where the step draws random numbers up to the end of a part."""
    expected: dict[int, list[list[float]]] | None = None
    """In the proof: fingerprints of the arguments that units must get."""

    @property
    def key(self) -> Any:
        shapes = signature(self.args[0] if self.args else None)
        return self.name, self.pipeline.module.training, self.pipeline.trained, shapes

    def call(self) -> Any:
        """The module's own method, with random streams at the start of a microbatch."""
        seed = self.seed if self.earlier is None else self.earlier
        random_streams.restart_python(seed)
        random_streams.restart(seed, -1)
        # training_step runs again on the same batch, here or for the rehearsal
        args = unshared(self.args) if self.name == "training_step" else self.args
        # a step may leave gradients enabled (geomloss does); Lightning disables them once for a whole loop
        with torch.set_grad_enabled(torch.is_grad_enabled()), self.pipeline.hooks.context():
            return getattr(self.pipeline.module, self.name)(*args)
