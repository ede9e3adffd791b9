"""Money and energy."""


def rent(*, devices: int, dollars_per_hour: float, hours: float) -> float:
    """Dollars for `devices` at a price per device and hour."""
    return devices * dollars_per_hour * hours


def energy_kwh(*, devices: int, watts: float, hours: float, overhead: float = 1.2) -> float:
    """Kilowatt-hours at the wall: `overhead` is what cooling and power supply add (PUE)."""
    return devices * watts * hours * overhead / 1000
