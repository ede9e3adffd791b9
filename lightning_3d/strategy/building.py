"""Modules that are built where each rank is going to have a part."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_3d.module.materialize import materialize
from lightning_3d.strategy.first_values import built_in_parts, keep_on_host
from lightning_3d.strategy.training import Training


class Building(Training):
    """Builds modules in parts, in `configure_model`, in `trainer.init_module()` and on meta."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build modules: in `configure_model`, in `trainer.init_module()`, and on meta."""
        with super().tensor_init_context(empty_init), self._in_parts():
            yield

    @contextmanager
    def _in_parts(self) -> Iterator[None]:
        if not self._divides:
            yield
            return
        with built_in_parts() as built:
            yield
        self._built = (*self._built, built)

    def model_to_device(self) -> None:
        if any(tensor.is_meta for tensor in (*self._module.parameters(), *self._module.buffers())):
            with self._in_parts():
                materialize(self._module, self.root_device)
        if self._divides:
            keep_on_host(self._module, self.root_device)
        self._module.to(self.root_device)
