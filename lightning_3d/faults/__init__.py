"""When a rank dies, stops or goes astray: what each did last, who it was, and that nobody waits for it in vain."""

from lightning_3d.faults.flight_recorder import Doing as Doing
from lightning_3d.faults.flight_recorder import flight as flight
from lightning_3d.faults.preemption import Preemption as Preemption
from lightning_3d.faults.watchdog import Watchdog as Watchdog
