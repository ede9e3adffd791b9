"""SIGTERM, a cluster's own warning and `trainer.should_stop`: if one rank is to stop, all stop at the same batch.

Lightning answers a signal with collectives inside the handler, even where the signal interrupted a collective. A rank
that a callback stops would leave its loops alone. Its collectives of the end would meet the next batch of the others.
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

from lightning_3d.faults.flight_recorder import flight
from lightning_3d.module.undo import do_nothing
from lightning_3d.ranks.talk import PendingMax

NOTHING, END, REQUEUE = 0, 1, 2


Ask = Callable[[list[int]], PendingMax]
"""Send this rank's numbers, without a wait for the others. Collective over the world."""


class Preemption:
    """Answers signals for one run of a Trainer. Made before Lightning registers its handlers.

    After a batch the ranks say what they want, and continue. They do what any rank wanted one batch later, when the
    answer is there. A rank that wants to stop waits for the answer at once. If all ranks want to stop, they stop at
    this batch, as one device does.
    """

    def __init__(self, trainer: Trainer, ask: Ask, path: Callable[[], str]) -> None:
        self.trainer, self.ask, self.path = trainer, ask, path
        self.under_way: PendingMax | None = None
        self.asked = self.agreed = NOTHING
        private: Any = trainer
        self.connector, self.loop = private._signal_connector, private.fit_loop.epoch_loop
        self.undo: list[Callable[[], None]] = []
        self.fitting = trainer.state.fn == TrainerFn.FITTING
        if not self.fitting:
            self._replace(self.connector, "_sigterm_notifier_fn", self._end_now)
            return
        self.requeue, self.advance = self.connector._slurm_sigusr_handler_fn, self.loop.advance
        self.end_advance = trainer.fit_loop.on_advance_end
        self._replace(self.connector, "_sigterm_notifier_fn", lambda *_: self._ask(END))
        self._replace(self.connector, "_slurm_sigusr_handler_fn", lambda *_: self._ask(REQUEUE))
        self._replace(self.loop, "_broadcast_sigterm_tensor", do_nothing)  # rank 0's: all ranks have agreed already
        self._replace(self.loop, "advance", self._advance)
        self._replace(trainer.fit_loop, "on_advance_end", self._end_advance)

    def close(self) -> None:
        """Leave the Trainer's loop and signals as they were."""
        while self.undo:
            self.undo.pop()()

    def after_validation(self) -> None:
        """Agree after validation: callbacks may stop the run there, and a signal may come during it."""
        if self.fitting:
            self._agree(now=True)

    def _replace(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Replace an attribute until `close`. A value of the user, from before or since, then stays."""
        attributes = vars(owner)
        before = {name: attributes[name]} if name in attributes else {}
        attributes[name] = ours

        def restore() -> None:
            if attributes.get(name) is ours:
                del attributes[name]
                attributes.update(before)

        self.undo.append(restore)

    def _ask(self, what: int) -> None:
        self.asked = max(self.asked, what)

    def _advance(self, *args: Any, **kwargs: Any) -> None:
        if self.agreed:
            self._end(self.agreed)
        flight.at("between steps", self.trainer.global_step)
        self.advance(*args, **kwargs)
        self._agree()

    def _end_advance(self, *args: Any, **kwargs: Any) -> None:
        """It runs callbacks that may stop the run outside of a batch."""
        self.end_advance(*args, **kwargs)
        self._agree(now=True)

    def _agree(self, *, now: bool = False) -> None:
        """Before the Trainer looks at `should_stop`: to validate once more, or to leave a loop."""
        mine = bool(self.trainer.should_stop)
        answer, before = self.ask([self.asked, int(mine), -int(mine)]), self.under_way
        self.under_way = None if now else answer
        known = [before.wait()] if before is not None else []
        if now:
            known.append(answer.wait())
        self.agreed = max([self.agreed, *(asked for asked, _, _ in known)])
        stop = any(some for _, some, _ in known)
        if mine and not stop:
            stop = answer.wait()[2] == -1  # all ranks do
        self.trainer.should_stop = stop

    def _end(self, asked: int) -> None:
        if asked == REQUEUE:
            self.requeue(signal.SIGUSR1, None)  # Lightning's own: saves, and has the cluster start the job again
        elif not self._saved_by_others():
            path = self.path()
            self.trainer.save_checkpoint(path)
            rank_zero_info(f"Asked to end: saved step {self.trainer.global_step} to {path}.")
        self.connector.received_sigterm = True
        raise SIGTERMException

    def _saved_by_others(self) -> bool:
        """Return True if a callback saves when it gets the exception that ends the run."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        return any(isinstance(c, OnExceptionCheckpoint) or getattr(c, "save_on_exception", False) for c in callbacks)

    def _end_now(self, signum: int, _: Any) -> None:
        """End at once: outside of a fit there is nothing to save."""
        launcher = self.trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
