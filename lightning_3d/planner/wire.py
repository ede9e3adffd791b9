"""What crosses the links: elements, per axis. Multiply by bytes per element, or divide by a bandwidth."""

from lightning_3d.layout import ZeroStage


def ring_all_reduce(elements: float, ranks: int) -> float:
    """Elements that each of `ranks` ranks sends to all-reduce a buffer on a ring: `2(N-1)/N` of it."""
    return 2 * ring_reduce_scatter(elements, ranks)


def ring_reduce_scatter(elements: float, ranks: int) -> float:
    """Elements that each rank sends to reduce-scatter a buffer on a ring: `(N-1)/N` of it; an all-gather the same."""
    return elements * (ranks - 1) / ranks


def zero_elements(parameters: float, stage: ZeroStage) -> float:
    """Elements per rank and step as the ZeRO paper counts them: `2P` for stages 0 to 2, `3P` for stage 3."""
    return parameters * (3 if stage == 3 else 2)


def data_elements(parameters: float, *, stage: ZeroStage, ranks: int) -> float:
    """Elements each rank sends on rings per step: `zero_elements` times `(N-1)/N`, so none for one rank."""
    return ring_reduce_scatter(zero_elements(parameters, stage), ranks)


def pipeline_elements(*, batch: int, sequence: int, hidden: int) -> int:
    """Elements over one stage boundary, in one direction, for one microbatch: `bsh`."""
    return batch * sequence * hidden


def tensor_elements(*, batch: int, sequence: int, hidden: int, tensor: int) -> float:
    """Elements each tensor rank sends for one layer and one microbatch, forward and backward: `8bsh(t-1)/t`.

    Two all-reduces forward and two backward; with sequence parallelism each is a reduce-scatter and an all-gather,
    which send as much.
    """
    return 4 * ring_all_reduce(batch * sequence * hidden, tensor)


def powersgd_elements(rows: int, columns: int, rank: int) -> int:
    """Elements that PowerSGD sends in place of a `rows` x `columns` gradient: `(m+n) r`."""
    return (rows + columns) * rank
