"""The dry run: a user's own script on a cluster that is not there."""

from lightning_3d.tools.dryrun.cluster import parse_cluster as parse_cluster
from lightning_3d.tools.dryrun.simulation import dry_run_script as dry_run_script
from lightning_3d.tools.dryrun.simulation import in_world as in_world
