"""Observes the first batch before the cut: one microbatch, and whether the loss of all is the mean over its parts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import distributed as dist

from lightning_3d.errors import Lightning3DError, UnsupportedError
from lightning_3d.layout import Layout
from lightning_3d.module.undo import UndoStack
from lightning_3d.pipeline.gates import Gates
from lightning_3d.pipeline.loss_mean import (
    UNSEEN,
    VERDICTS,
    LossMean,
    Runs,
    StepResult,
    compare_parts,
    find_mixing,
    norms_on_running_statistics,
    parameters_of_last_block,
    step_result,
    training_only,
)
from lightning_3d.pipeline.microbatch import TENSORS, Rows, microbatch_sizes, split_batch
from lightning_3d.pipeline.observe import UncutRun, observe, run_step
from lightning_3d.pipeline.peer_runs import PeerRuns
from lightning_3d.ranks import talk
from lightning_3d.ranks.rank_zero import rank_local
from lightning_3d.sandbox.first_batch import STEPS, first_batch, loaders_of, map_style, promised_samples, step_arguments
from lightning_3d.sandbox.interceptor import Interceptor
from lightning_3d.sandbox.silence import SilenceRandom
from lightning_3d.sandbox.trees import loss_of, unshared
from lightning_3d.sandbox.trial import trial
from lightning_3d.sandbox.writes import RefuseWrites


@dataclass
class _OtherRuns:
    """Runs of the step on parts of the batch and on all of it, without dropout and noise.

    Each has another seed than the first: the stages of a pipeline must know which block comes next, whatever is drawn.
    """

    module: Any
    uncut: UncutRun
    units: Sequence[str]
    context: Callable[[], AbstractContextManager[Any]]
    full_batch: Any
    on_full_batch: Callable[[], AbstractContextManager[Any]]
    """Entered around runs on the full batch."""
    peers: PeerRuns
    failed: bool = False
    """True once a run, here or on a peer, gave nothing to compare."""

    def divide(self, runs: Runs, costs: Sequence[float]) -> list[StepResult | None]:
        """The results of `runs`, made by this rank and its peers."""
        results = self.peers.divide(runs, costs)
        self.failed = self.failed or None in results
        return results

    def __call__(self, rows: Any, seed: int, marked: bool) -> StepResult | None:
        args = (rows, *self.uncut.args[1:])
        parameters = parameters_of_last_block(self.module, self.uncut.calls)
        undo = UndoStack()
        gates = Gates(self.module, self.units, (), undo)
        around = self.on_full_batch if rows is self.full_batch else nullcontext
        try:
            with trial(self.module, gradients=True, optimizers=False), training_only(self.module, parameters):
                with around(), Interceptor(SilenceRandom()), rank_local():
                    seed += self.uncut.seed
                    other, output = run_step(
                        self.module, gates, self.uncut.step, args, self.context, seed, marked=marked
                    )
                result = step_result(loss_of(output), parameters, other.marks)
        except Lightning3DError:
            raise
        except Exception:  # code that needs real noise, or differentiates by other weights itself
            return None
        finally:
            undo.close()
        self._refuse_random_order(tuple(other.calls))
        return result

    def _refuse_random_order(self, calls: tuple[str, ...]) -> None:
        expected = self.uncut.calls
        if self.uncut.drawn and calls != expected:
            raise UnsupportedError(
                f"{self.uncut.step} draws at random which blocks to run: {len(expected)} calls of blocks with one seed,"
                f" {len(calls)} with another, in another order. The stages of a pipeline must know what comes next."
                " Draw inside of the block (return its input to skip it), or use pipeline_parallel_size=1."
            )


_NO_MEAN = (
    ": it is no mean over samples (tokens that a mask leaves out unevenly, pairs of samples), so microbatches do not"
    " train exactly as one device does. loss_scope='auto' or 'batch' computes it on the full batch."
)
_NORMALIZES = (
    ": batch norm inside of blocks normalizes over the samples of a microbatch, so microbatches do not train exactly as"
    " one device does. num_microbatches=1 runs the full batch at once."
)
_IN_PIECES = "which under a pipeline each microbatch would do, on a stage that may not have it"


def observe_one_batch(
    trainer: Trainer,
    module: LightningModule,
    units: Sequence[str],
    layout: Layout,
    to_device: Callable[[Any], Any],
    context: Callable[[], AbstractContextManager[Any]],
    loss_scope: str,
    groups: Sequence[dist.ProcessGroup],
    on_full_batch: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> UncutRun | None:
    """Observe the step that is about to run, on the first microbatch of its first batch, forward and backward.

    None where the batch cannot be read twice (a stream), or where the step fails on a rank. Then the pipeline learns
    the order of blocks from their declaration. Collective; an error of one rank is raised on all.

    Args:
        units: names of the modules that a pipeline will place.
        context: entered around a step (autocast).
        loss_scope: "microbatch" warns if the loss is no mean over samples.
        groups: this rank's tensor and pipeline groups.
        on_full_batch: entered around runs on the full batch.
    """
    assert trainer.state.fn is not None
    name, fitting = STEPS[trainer.state.fn], trainer.state.fn == TrainerFn.FITTING

    def observation(peers: PeerRuns) -> UncutRun | None:
        loaders = loaders_of(trainer)
        if not map_style(loaders):
            return None
        args = step_arguments(getattr(module, name), to_device(first_batch(loaders)))
        cut = fitting and bool(args)  # evaluation runs full batches
        rows = Rows.of(args[0], promised_samples(loaders), module) if cut else TENSORS
        sizes = microbatch_sizes(args[0], layout.num_microbatches, layout.pipeline_parallel_size, rows) if cut else [1]
        pieces = split_batch(args[0], sizes, rows) if args else []

        def run(rows: Any) -> None:
            with trial(module, gradients=fitting, optimizers=False), context():
                loss_of(getattr(module, name)(unshared(rows), *args[1:]))

        with _cut_as_rows(run, args, sizes, name):
            first = (*pieces[:1], *args[1:])
            uncut = observe(module, units, name, first, context=context, loss_of=loss_of, compared=fitting)
            others = _OtherRuns(module, uncut, units, context, args[0] if cut else None, on_full_batch, peers)
            mean = _test_for_mean(others, args[0], sizes, rows, loss_scope) if cut else UNSEEN
            if not cut or others.failed:
                for second in pieces[1:2]:  # code that counts from the start of the batch is right in the first
                    run(second)
        return replace(uncut, loss_mean=mean)

    return _on_every_rank(observation, module, name, groups)


def _test_for_mean(others: _OtherRuns, batch: Any, sizes: list[int], rows: Rows, loss_scope: str) -> LossMean:
    """Test that the loss is a mean over samples, without the batch norms of blocks if it is none with them.

    Those normalize over a microbatch wherever the loss is computed, so they do not decide about the loss.
    """
    if loss_scope == "batch" and (others.uncut.drawn or len(sizes) == 1):  # other numbers would look like other samples
        return UNSEEN
    if loss_scope == "batch":
        with norms_on_running_statistics(others.module, others.units):
            return find_mixing(others, batch, sizes, others.uncut.rounding, rows, others.divide)
    mean = compare_parts(others, batch, sizes, others.uncut.rounding, rows, others.divide)
    if mean.verdict != "no mean":
        return mean
    with norms_on_running_statistics(others.module, others.units) as frozen:
        alone = compare_parts(others, batch, sizes, others.uncut.rounding, rows) if frozen else mean
    because_of_norms = alone.verdict == "mean"
    if because_of_norms or loss_scope == "microbatch":
        why = _NORMALIZES if because_of_norms else _NO_MEAN
        rank_zero_warn(f"pipeline_parallel_size cuts batches into microbatches, but {mean.reason}{why}")
    return alone


def _on_every_rank(
    observation: Callable[[PeerRuns], UncutRun | None],
    module: LightningModule,
    step: str,
    groups: Sequence[dist.ProcessGroup],
) -> UncutRun | None:
    """The result of `observation`, if it has one on every rank. An UnsupportedError of one rank is raised on all."""

    def leave_no_trace() -> UncutRun | None:
        peers = PeerRuns(groups)
        try:
            refuse = Interceptor(RefuseWrites(module.named_parameters, _IN_PIECES))
            with trial(module, gradients=True, logs=False), refuse:
                uncut = observation(peers)
        except Exception as error:
            peers.close()
            if isinstance(error, UnsupportedError):
                raise
            rank_zero_warn(
                f"{step} could not be run on a microbatch ahead of training ({type(error).__name__}: {error}). Its"
                " blocks are taken to run in the order of their declaration, and to exchange values by their arguments"
                " only."
            )
            return None
        peers.close()
        return uncut

    uncut = talk.together(leave_no_trace, UnsupportedError)
    mine = (uncut.calls, uncut.read, uncut.loss_mean) if uncut is not None else None
    if talk.all_equal(mine):
        return uncut
    seen = talk.gather(mine)
    found = [each for each in seen if each is not None]
    if uncut is None or len(found) < len(seen):
        return None
    calls, read, _ = found[0]  # all ranks must cut alike
    means = [mean for _, _, mean in found]
    worst = max(means, key=lambda mean: VERDICTS.index(mean.verdict))
    mixing = min((mean.mixing for mean in means if mean.mixing is not None), default=None)
    return replace(uncut, calls=calls, read=read, loss_mean=replace(worst, mixing=mixing))


@contextmanager
def _cut_as_rows(run: Callable[[Any], None], args: tuple[Any, ...], sizes: list[int], step: str) -> Iterator[None]:
    """Refuse the cut where the code inside fails on a microbatch, and `run` works on the full batch."""
    try:
        yield
    except UnsupportedError:
        raise
    except Exception as error:
        if len(sizes) == 1 or not _works(run, args[0]):
            raise
        raise UnsupportedError(
            f"{step} runs on a batch, and fails on one of the {len(sizes)} microbatches that a pipeline cuts it into"
            f" along dimension 0: {sizes[0]} of {sum(sizes)} rows ({type(error).__name__}: {error}). Something in the"
            " batch is not one row for each sample and belongs to all of them: targets of all samples in one tensor,"
            " offsets, the edges of a graph. num_microbatches=1 runs the full batch at once."
        ) from error


def _works(run: Callable[[Any], None], batch: Any) -> bool:
    try:
        run(batch)
    except UnsupportedError:
        raise
    except Exception:
        return False
    return True
