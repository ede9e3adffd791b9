"""Starts the other processes of a job where a script is simply run, also in Hydra runs and sweeps."""

from lightning_3d.launch.first_meeting import store_of_attempt as store_of_attempt
from lightning_3d.launch.hydra_job import job_folder as job_folder
from lightning_3d.launch.launchers import ScriptLauncher as ScriptLauncher
from lightning_3d.launch.launchers import SpawnLauncher as SpawnLauncher
from lightning_3d.launch.launchers import can_run_again as can_run_again
from lightning_3d.launch.submitit import joined as joined
