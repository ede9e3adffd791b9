"""Every plan that fits: what the planner's search, which leaves out the hopeless ones, is held to."""

from lightning_3d.planner.search import ANYTHING, families, fitting, offloads, order


def search(job, cluster, pins=ANYTHING):
    """Plans that fit, fastest first; among equals the simplest. Offload is tried only where nothing fits without."""
    members = list(families(job, cluster, pins))
    for offload in offloads(pins):
        plans = [plan for family in members for plan in fitting(job, cluster, family, pins, offload)]
        if plans:
            return sorted(plans, key=order)
    return []
