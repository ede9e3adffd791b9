"""The layout to go on with when a job comes back with another number of ranks. Pure, no process group."""

from collections.abc import Iterator
from dataclasses import replace
from math import isqrt

from lightning_3d.errors import LayoutError
from lightning_3d.layout import Layout


def refit(layout: Layout, windows: int, world: int, blocks: int | None = None) -> tuple[Layout, int]:
    """A layout for `world` ranks, and how many batches to accumulate so that an optimizer step sees the same samples.

    The data axis shrinks or grows first, with tensor and pipeline sizes as they are; where that cannot keep the global
    batch, the pipeline changes, then the tensor size, each by as little as possible.

    Args:
        layout: what the user asked for; its data size does not matter.
        windows: batches that one optimizer step was made of: data ranks times accumulated batches.
        world: ranks there are now.
        blocks: that the module's pipeline can be cut between, if known.
    """
    found = min(_candidates(layout, windows, world, blocks), key=lambda each: _changes(layout, each), default=None)
    if found is None:
        counts = _divisors(windows)
        model = layout.tensor_parallel_size * layout.pipeline_parallel_size
        raise LayoutError(
            f"{world} ranks cannot go on with the run: an optimizer step was made of {windows} batches (data ranks x"
            f" accumulate_grad_batches), which no layout of {world} ranks divides evenly. Start"
            f" {', '.join(str(n * model) for n in counts)} ranks, or pass ckpt_path= to go on as you set it."
        )
    return found, windows // found.data_parallel_size


def _candidates(layout: Layout, windows: int, world: int, blocks: int | None) -> Iterator[Layout]:
    for data in _divisors(world):
        if windows % data:
            continue
        for tensor in _divisors(world // data):
            pipeline = world // data // tensor
            if layout.tensor_parallel_size % tensor:
                continue  # what was split over N ranks can surely be split over a divisor of N only
            if pipeline != layout.pipeline_parallel_size and not _can_cut(layout, pipeline, blocks):
                continue
            yield replace(layout, data_parallel_size=data, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)


def _can_cut(layout: Layout, pipeline: int, blocks: int | None) -> bool:
    """Whether a pipeline of another size is sure to work."""
    most = layout.num_stages if blocks is None else max(blocks, 1)
    return pipeline == 1 or pipeline * layout.stages_per_rank <= most


def _changes(wanted: Layout, layout: Layout) -> tuple[float, ...]:
    tensor = wanted.tensor_parallel_size / layout.tensor_parallel_size
    pipeline = wanted.pipeline_parallel_size / layout.pipeline_parallel_size
    return (tensor, max(pipeline, 1 / pipeline), -layout.data_parallel_size)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
