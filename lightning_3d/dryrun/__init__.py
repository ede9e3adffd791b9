"""The dry run: a user's own script on a cluster that is not there."""

from lightning_3d.dryrun.launcher import DryLauncher as DryLauncher
from lightning_3d.dryrun.report import DryRunReport as DryRunReport
from lightning_3d.dryrun.report import RankReport as RankReport
from lightning_3d.dryrun.script import dry_run_script as dry_run_script
from lightning_3d.dryrun.world import current_world as current_world
from lightning_3d.dryrun.world import in_world as in_world
from lightning_3d.dryrun.world import parse_cluster as parse_cluster
from lightning_3d.dryrun.world import world_for as world_for
