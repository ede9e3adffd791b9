"""Costs that grow with the number of ranks: latency of collectives, and restarts after failures."""

from math import ceil, log2

from lightning_3d.planner.hardware import Cluster

LOST_SECONDS = 1001.0
"""Lost by one failure: Llama 3 405B lost less than 10% of 54 days to 466 interruptions, checkpoints included."""


def ring_latency(cluster: Cluster, *, span: int, stride: int) -> float:
    """Seconds of a gather or a reduce-scatter of nothing on a ring of `span` ranks at a distance of `stride`."""
    device, nodes = cluster.accelerator, _nodes(cluster, span, stride)
    if span == 1:
        return 0.0
    return (device.start_us + (span - nodes) * device.node_hop_us + (nodes - 1) * device.network_hop_us) * 1e-6


def sum_latency(cluster: Cluster, *, span: int, stride: int) -> float:
    """Seconds of an all-reduce of nothing: on a ring twice, or up and down a tree that branches between nodes."""
    device, nodes = cluster.accelerator, _nodes(cluster, span, stride)
    if span == 1:
        return 0.0
    tree = (span / nodes - 1) * device.tree_hop_us + log2(nodes) * device.network_hop_us
    return min(2 * ring_latency(cluster, span=span, stride=stride), (device.start_us + 2 * tree) * 1e-6)


def running_share(cluster: Cluster) -> float:
    """Share of the time in which a training runs, and does not repeat steps or wait for a restart."""
    hours = cluster.accelerator.failure_hours
    if not hours:
        return 1.0
    between = hours * 3600 / cluster.devices
    return between / (between + LOST_SECONDS)


def _nodes(cluster: Cluster, span: int, stride: int) -> int:
    """Nodes that a ring of `span` ranks reaches."""
    return min(span, ceil(span * stride / cluster.domain))
