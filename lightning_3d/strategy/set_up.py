"""The walk of `setup`: check the module, place it, plan and apply the parallelisms, prepare the steps."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer, SparseAdam

from lightning_3d.activations.recompute_blocks import BudgetFit
from lightning_3d.axes.parameters import Parameters
from lightning_3d.axes.state_dict import full_module_state, full_optimizer_state, own_entries, swap_parameters
from lightning_3d.data.loaders_private import check_remade_loaders
from lightning_3d.data.same_samples import SampleCheck
from lightning_3d.errors import UnsupportedError
from lightning_3d.faults import flight
from lightning_3d.launch import SpawnLauncher
from lightning_3d.launch.lightning_private import without_module_ranges
from lightning_3d.layout import PIPELINE_AXIS
from lightning_3d.module.metrics import gather_over
from lightning_3d.module.packed_weights import check_packed, check_saved
from lightning_3d.module.step_check import StepCheck
from lightning_3d.module.torch_private import saved_buffers
from lightning_3d.optim.grad_norm import clip_like_one_device, counted_here, grad_norm
from lightning_3d.optim.step import (
    check_state,
    follow_mean,
    move_states,
    refuse_new_parameters,
    step_like_one_device,
)
from lightning_3d.optim.step_from_disk import offload_states
from lightning_3d.parallel import parallel_plan
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.parallelize import parallelize
from lightning_3d.pipeline.cut_module import check_automatic, check_supported
from lightning_3d.ranks import agreement, talk
from lightning_3d.ranks.mesh import expert_place
from lightning_3d.ranks.random_streams import StepRandom
from lightning_3d.sandbox.deferred import computed_on_use
from lightning_3d.sandbox.without_values import kept
from lightning_3d.strategy.checks import (
    HookCheck,
    check_module,
    check_modules,
    check_same_module,
    check_shared_memory,
    check_user_code,
)
from lightning_3d.strategy.fit_report import FitReport
from lightning_3d.strategy.in_shards import check_whole, stays_in_shards
from lightning_3d.strategy.one_run import Run
from lightning_3d.strategy.placing import convert_module, leave_module, reuse_shards, share_values, users_alone
from lightning_3d.strategy.processes import Processes
from lightning_3d.strategy.resume import watch_preemption
from lightning_3d.strategy.steps import CheckedSteps, FirstStepAgrees, PipelineRunner, StepRunner, Window
from lightning_3d.usercode.averages_private import shard_averages
from lightning_3d.usercode.hooks import adapt_user_code, configuring
from lightning_3d.usercode.kept_weights import swap_kept, warn_of_lookups
from lightning_3d.verify.first_step import FirstStep
from lightning_3d.verify.replicas import BufferCheck, LossCheck, ReplicaCheck


def set_up(strategy: Processes, run: Run) -> None:
    assert strategy.accelerator is not None
    flight.at("placing the module")
    strategy.accelerator.setup(run.trainer)
    watch_preemption(run, strategy.layout)
    check_same_module(run.module)
    check_module(run.module, run.fitting)
    if run.in_shards is None:
        check_whole(run.module)
    if run.layout is None:
        assert strategy.sizes.auto is not None
        with users_alone(run.rank), computed_on_use(run.module), without_module_ranges(run.trainer):
            strategy.sizes.auto.choose(run.trainer, run.module, strategy, strategy.to_device)
        strategy.open_axes(strategy.layout)
    if run.chosen.pipelined:  # first: later checks assume automatic optimization
        check_automatic(run.module, cut=run.chosen.num_microbatches != 1)
    check_user_code(run)
    together = run.chosen.zero_stage == 3 or run.chosen.data_parallel_size < strategy.world_size
    adapt_user_code(
        run.module, run.callbacks, lambda: run.parallel, lambda: run.data, run.undo, together=together
    )  # fmt: skip
    check_remade_loaders(run.trainer, run.undo)
    run.undo.callback(gather_over(run.data_group, run.chosen))
    ends = isinstance(strategy.launcher, SpawnLauncher) or dist.get_backend() == "fake"
    run.stays_in_shards = stays_in_shards(
        run.settings.teardown, run.module, run.chosen, run.callbacks,
        ends=ends, ranks_of_host=strategy.ranks_of_host, device=run.device,
    )  # fmt: skip
    first = None
    if run.in_shards is None:
        first = _place(strategy, run)
    else:
        reuse_shards(run, run.in_shards)
        _announce(run)
    if run.fitting:
        strategy.checkpoints.load_callbacks(run)
        with configuring(run.data):
            strategy.setup_optimizers(run.trainer)
        HookCheck(run.module, run.chosen).before_train()  # configure_optimizers may have added some
        norm = partial(norm_of, run)
        run.undo.callback(clip_like_one_device(run.module, norm))
        move_states(strategy.optimizers, run.device, run.settings.offloads_states)
        run.reporting.prepare()
    strategy.setup_precision_plugin()
    prepare_steps(run, first)


def _place(strategy: Processes, run: Run) -> FirstStep | None:
    """Plan the parallelisms of a module that is not divided yet, and apply them."""
    parallel = ParallelModule(run.module)
    run.undo.callback(leave_module, run, parallel)
    convert_module(run, parallel, strategy._layer_sync)
    strategy.model_to_device()
    check_packed(run.module, run.chosen)  # the move quantises
    if run.fitting:
        buffers = saved_buffers(run.module) if run.trainer.checkpoint_callbacks else ()
        sharded = strategy.checkpoints.keeper.is_sharded(run.module, strategy.checkpoint_io)
        check_saved(run.module, buffers, sharded=sharded)
    check_modules(run.module, run.chosen)
    check_shared_memory(run.module, run.chosen)  # the move gives tensors of one memory their own
    share_values(run, strategy.take_built())
    with without_module_ranges(run.trainer):
        first = FirstStep(run.module, run.plugin.forward_context) if run.verifies_first else None
        run.plan = parallel_plan.make_plan(
            run.trainer, run.module, run.chosen, run.mesh, run.settings.choices, strategy.to_device, run.plugin
        )
    run.parallel = parallel
    _announce(run)
    training = run.fitting or run.stays_in_shards  # a later run may train with shards
    parallelize(parallel, run.plan, run.chosen, run.mesh, run.data_axis, run.plugin, run.device, training=training)
    _follow_kept(run, parallel)
    full_module_state(run.module, parallel.parameters, talk.meet, parallel.changes)
    shard_averages(run.callbacks, parallel, strategy.as_saved)
    return first


def _follow_kept(run: Run, parallel: ParallelModule) -> None:
    """Have containers in attributes of the user's objects hold the weights of now. Undone with the changes."""
    owners = [*run.module.modules(), *run.callbacks, *filter(None, [getattr(run.trainer, "datamodule", None)])]
    swaps = parallel.parameters.swaps()
    looked_up = swap_kept(owners, swaps)
    parallel.changes.callback(partial(swap_kept, owners, {now: before for before, now in swaps.items()}))
    if run.fitting and run.chosen.shards_data:
        warn_of_lookups(run.module, looked_up, run.chosen.zero_stage)


def _announce(run: Run) -> None:
    if run.fitting and run.plan is not None:
        run.report = FitReport(run.trainer, run.placed, run.plan, run.chosen, run.place, run.device, run.settings.quiet)


def prepare_optimizers(run: Run, optimizers: Sequence[Optimizer], reduce: Callable[..., Tensor]) -> None:
    """Let `optimizers` step on shards as they do on one device."""
    parallel, place = run.placed, run.settings.choices.offload.optimizer
    table = parallel.parameters
    parallel.fitted.close()
    if parallel.stages is not None:
        check_supported(run.module, optimizers, run.callbacks)
    agreement.together(partial(_check_kept, optimizers, table), local=True)
    # an optimizer built earlier still has the originals, and their states
    swap_parameters(optimizers, table.swaps(), [own_entries(optimizer, table) for optimizer in optimizers])
    for optimizer in optimizers:
        if isinstance(optimizer, SparseAdam) and run.chosen.gradient_ranks > 1:
            raise UnsupportedError(
                "SparseAdam takes sparse gradients, and data ranks average dense ones. Use Adam and sparse=False, which"
                " also steps the rows that a batch does not look up, or tensor_parallel_size in place of data ranks."
            )
        if run.chosen.holds_parts:
            check_state(optimizer)
        for absent in [key for key in optimizer.state if isinstance(key, Tensor) and key.is_meta]:
            del optimizer.state[absent]  # some fill their state when they are built (Adagrad)
        stepping = step_like_one_device(
            optimizer, table.full, table.shard, reduce, pipelined=parallel.stages is not None, host=place is not None
        )
        run.undo.callback(stepping)
        offload_states(optimizer, place, parallel.disk, table.disk, run.undo)
        run.undo.callback(refuse_new_parameters(optimizer, table, run.chosen))
        full_optimizer_state(optimizer, table, run.data.gathered, talk.meet, parallel.fitted)
        run.optimizers.append(optimizer)
    if run.chosen.data_parallel_size > 1:
        follow_mean(reduce, run.module.device, run.undo)


def _check_kept(optimizers: Sequence[Optimizer], table: Parameters) -> None:
    """Raise where `optimizers` have a weight twice, those of before set-up and those of now: code compared `id(p)`."""
    given = {each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    for held in table:
        if held.now is not held.before and given.issuperset((held.before, held.now)):
            raise kept(held.before)


def norm_of(run: Run, parameters: Iterable[nn.Parameter], norm_type: float) -> Tensor:
    """The norm of the gradients of `parameters` on all ranks. Collective."""
    place, shard, table = run.place, run.chosen.shard_size, run.placed.parameters  # not for each parameter again
    replica, _ = expert_place(run.chosen, place)

    def counted(parameter: nn.Parameter) -> bool:
        assert parameter.grad is not None
        # of a shard too it is whole within a window of accumulation
        return counted_here(parameter.grad, place, shard, replica) and table.counts(parameter)

    return grad_norm(parameters, counted, norm_type, run.device)


def prepare_steps(run: Run, first: FirstStep | None) -> None:
    """Make the steps of `run`, with checks around them. `first` has the unsplit module, to compare the first step."""
    parallel, plugin, layout, place = run.placed, run.plugin, run.chosen, run.place
    random = StepRandom(layout, place)
    window = Window(run.trainer, run.module, parallel.data)
    runner = StepRunner(parallel, random, window)
    if parallel.pipeline is not None:
        runner = PipelineRunner(parallel, random, window, plugin, run.undo)
    checks: list[StepCheck] = [
        SampleCheck(layout, place, run.mesh, run.device, run.trainer),
        LossCheck(layout, place, run.module, plugin.forward_context),
        BufferCheck(place, run.module, run.data_group),
        HookCheck(run.module, layout),
    ]
    once = layout.zero_stage == 0 and layout.data_parallel_size == layout.world_size > 1  # peers may round otherwise
    if (asked := run.settings.verify == "replicas") or once:
        checks.append(ReplicaCheck(parallel, layout, run.device, once=not asked))
    if parallel.recomputed is not None and parallel.recomputed.choice.mode == "auto":
        checks.append(BudgetFit(parallel.recomputed, run.module, place[PIPELINE_AXIS]))
    if first is not None:
        checks.append(FirstStepAgrees(first, parallel, run.data_group, random, window, plugin))
    run.steps = CheckedSteps(runner, checks, window, random)
    run.undo.callback(run.steps.close)
