"""The dry run: a user's own script on a cluster that is not there."""

from lightning_3d.dryrun.cluster import current_world as current_world
from lightning_3d.dryrun.cluster import in_world as in_world
from lightning_3d.dryrun.cluster import parse_cluster as parse_cluster
from lightning_3d.dryrun.cluster import world_for as world_for
from lightning_3d.dryrun.launcher import DryLauncher as DryLauncher
from lightning_3d.dryrun.report import DryRunReport as DryRunReport
from lightning_3d.dryrun.report import RankReport as RankReport
from lightning_3d.dryrun.run_script import dry_run_script as dry_run_script
