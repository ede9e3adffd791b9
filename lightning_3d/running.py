"""Lightning's step hooks on a placed module."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.broadcast import broadcast_tensors
from lightning_3d.compose import Composed
from lightning_3d.saving import Saving
from lightning_3d.steps import Steps


class Running(Saving):
    """Runs training, validation, test and predict steps, backward and the optimizers' steps."""

    _steps: Steps | None = None
    _in_step = False

    @property
    def _applied(self) -> Composed:
        assert self._composed is not None, "the module is placed from setup on"
        return self._composed

    @property
    def _running(self) -> Steps:
        assert self._steps is not None, "the module is placed from setup on"
        return self._steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._in_step = True
        output = self._running.train(lambda: super(Running, self).training_step(*args, **kwargs), args)
        self._in_step = False
        if not self._module.automatic_optimization:  # its backwards and optimizer steps are over
            self._applied.data.end()
            self._applied.data.rest()
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        call = super().validation_step
        return self._running.evaluate("validation_step", lambda: call(*args, **kwargs), args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        call = super().test_step
        return self._running.evaluate("test_step", lambda: call(*args, **kwargs), args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        call = super().predict_step
        return self._running.evaluate("predict_step", lambda: call(*args, **kwargs), args)

    def pre_backward(self, closure_loss: Tensor) -> None:
        self._running.before_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        self._running.after_backward()

    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        if self._in_step:  # manual optimization: what has the gradients is in place again
            self._applied.data.rest()
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._applied.data.rest()
        if self._in_step:  # the user's step goes on with the new parameters
            self._applied.data.begin()
        return output

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._running.hold(True)
        try:
            yield
        finally:
            self._running.hold(False)

    def on_validation_end(self) -> None:
        self._applied.data.rest()

    def on_test_end(self) -> None:
        self._applied.data.rest()

    def on_predict_end(self) -> None:
        self._applied.data.rest()

    def on_validation_start(self) -> None:
        self._share_buffers()

    def on_test_start(self) -> None:
        self._share_buffers()

    def on_predict_start(self) -> None:
        self._share_buffers()

    def _share_buffers(self) -> None:
        """Evaluate with the buffers (batch-norm statistics, say) of the first data rank, as DDP does."""
        if self.layout.data_parallel_size > 1:
            buffers = [buffer for buffer in self._module.buffers() if not buffer.is_meta]
            broadcast_tensors(buffers, group=self.data_group)
