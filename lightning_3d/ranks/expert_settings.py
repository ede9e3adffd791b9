"""The settings under which data ranks cannot share experts. The planner reads it without torch."""

from lightning_3d.errors import LayoutError, UnsupportedError
from lightning_3d.layout import HALVED_BACKWARD, Layout


def check_layout(layout: Layout, shard_size: int | None, compression: str | None) -> None:
    """Raise for settings under which ranks cannot share experts."""
    ranks, size = layout.gradient_ranks, layout.expert_parallel_size
    if size == 1:
        return
    if ranks % size:
        raise LayoutError(
            f"expert_parallel_size={size} does not divide the {ranks} data and context ranks of {layout}: each group of"
            f" {size} of them owns all experts. Use a divisor of {ranks}."
        )
    if refused := not_with_experts(layout, shard_size, compression):
        raise UnsupportedError(
            f"expert_parallel_size={size} together with {refused[0]} is not supported: it was"
            " never compared with one device. Leave one of the two out."
        )


def not_with_experts(layout: Layout, shard_size: int | None, compression: str | None) -> list[str]:
    """The settings under which experts over data ranks were never compared with one device."""
    refused = {
        f"zero_shard_size={shard_size}": shard_size not in (None, layout.data_parallel_size),
        f"grad_compression={compression!r}": compression is not None,
        "offload of parameters": layout.offload == "all",
        "sequence_parallel": layout.sequence_parallel,
        f"schedule={layout.schedule!r}": layout.pipelined and layout.schedule in HALVED_BACKWARD,
    }
    return [what for what, used in refused.items() if used]
