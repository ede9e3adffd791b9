"""How the other processes of a job start when a script is simply run, also inside of Hydra runs and sweeps."""

from lightning_3d.launch.script import ScriptLauncher as ScriptLauncher
from lightning_3d.launch.spawn import SpawnLauncher as SpawnLauncher
