"""SIGTERM, a cluster's own warning and `trainer.should_stop`: all ranks act upon what any was told, at the same batch.

Lightning answers signals inside the handler, with collectives, whatever collective the signal interrupted; and a rank
that a callback tells to stop leaves its loops alone, to meet the others' next batch with the collectives of the end.
Touches four private names of Lightning (read in 2.6): `_signal_connector` with `_sigterm_notifier_fn` and
`_slurm_sigusr_handler_fn`, and `_broadcast_sigterm_tensor` of the epoch loop; `tests/faults/test_preempt.py` fails when
they change.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info

NOTHING, END, REQUEUE = 0, 1, 2
Agree = Callable[[list[int]], list[int]]
"""The largest numbers that any rank says. Collective over the world."""


class Preemption:
    """Answers signals for one run of a Trainer. Made before Lightning registers its handlers.

    Args:
        path: where to save, asked when it is time.
    """

    def __init__(self, trainer: Trainer, agree: Agree, path: Callable[[], str]) -> None:
        self.trainer, self.agree, self.path = trainer, agree, path
        self.asked = self.agreed = NOTHING
        self.connector, self.loop = _any(trainer._signal_connector), _any(trainer.fit_loop.epoch_loop)
        self.replaced: list[tuple[Any, str]] = []
        if trainer.state.fn != TrainerFn.FITTING:
            vars(self.connector)["_sigterm_notifier_fn"] = self._end_now
            return
        self.requeue, self.advance = self.connector._slurm_sigusr_handler_fn, self.loop.advance
        vars(self.connector).update(
            _sigterm_notifier_fn=lambda *_: self._ask(END), _slurm_sigusr_handler_fn=lambda *_: self._ask(REQUEUE)
        )
        vars(self.loop).update(_broadcast_sigterm_tensor=_nothing, advance=self._advance)
        self._agree_after(self.loop.val_loop, "run")
        self._agree_after(trainer.fit_loop, "on_advance_end")

    def close(self) -> None:
        """Leave the Trainer's loop and signals as they were."""
        vars(self.connector).pop("_sigterm_notifier_fn", None)
        vars(self.connector).pop("_slurm_sigusr_handler_fn", None)
        for name in ("_broadcast_sigterm_tensor", "advance"):
            vars(self.loop).pop(name, None)
        for owner, name in self.replaced:
            vars(owner).pop(name, None)

    def _ask(self, what: int) -> None:
        self.asked = max(self.asked, what)

    def _advance(self, *args: Any, **kwargs: Any) -> None:
        if self.agreed:
            self._end(self.agreed)
        self.advance(*args, **kwargs)
        self._agree()

    def _agree_after(self, owner: Any, name: str) -> None:
        """Also where callbacks may stop the run outside of a batch, or a signal come in the long time that it takes."""
        original = getattr(owner, name)

        def then_agree(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._agree()
            return result

        vars(owner)[name] = then_agree
        self.replaced.append((owner, name))

    def _agree(self) -> None:
        """Before the Trainer looks at `should_stop`: to validate once more, or to leave a loop."""
        self.agreed, stop = self.agree([self.asked, int(self.trainer.should_stop)])
        self.trainer.should_stop = bool(stop)

    def _end(self, asked: int) -> None:
        if asked == REQUEUE:
            self.requeue(signal.SIGUSR1, None)  # Lightning's own: saves, and has the cluster start the job again
        elif not self._saved_by_others():
            path = self.path()
            self.trainer.save_checkpoint(path)
            rank_zero_info(f"Told to end: saved step {self.trainer.global_step} to {path}.")
        self.connector.received_sigterm = True
        raise SIGTERMException

    def _saved_by_others(self) -> bool:
        """Whether a callback saves when it sees the exception that ends the run."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        return any(isinstance(c, OnExceptionCheckpoint) or getattr(c, "save_on_exception", False) for c in callbacks)

    def _end_now(self, signum: int, _: Any) -> None:
        """Outside of a fit there is nothing to save."""
        launcher = self.trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def _any(private: object) -> Any:
    """`private`, of which nothing is known to the type checker."""
    return private


def _nothing() -> None:
    """In place of Lightning's broadcast of rank 0's SIGTERM before each batch: all ranks have agreed already."""
