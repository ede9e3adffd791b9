"""Failures of ranks: the last actions of each rank, the rank to blame, and an end for all that wait for it."""

from lightning_3d.faults.flight_recorder import flight as flight
from lightning_3d.faults.preemption import Preemption as Preemption
from lightning_3d.faults.watchdog import Watchdog as Watchdog
