"""How long training takes, how many devices a deadline needs, and the rule of thumb beside the long way."""

from math import ceil

from lightning_3d.errors import PlannerError

DAY = 86400.0
YEAR = 365.25 * DAY
A100_PEAK, RULE_SHARE = 312e12, 0.40
"""FLOP/s of an A100 with 16-bit numbers, and the share of it that the rule of thumb takes to be reached."""


def training_seconds(
    *, tokens: float, parameters: float, devices: int, sustained: float, recompute: bool = False
) -> float:
    """`8TP/(nX)` with full recompute, `6TP/(nX)` without: a few percent below the exact FLOPs, which also count
    attention and the head."""
    if devices < 1:
        raise PlannerError(f"{devices} devices train nothing: give at least 1.")
    if sustained <= 0:
        raise PlannerError(f"a rate of {sustained:g} FLOP/s must be above 0.")
    return (8 if recompute else 6) * tokens * parameters / (devices * sustained)


def devices_for(seconds: float, *, device_seconds: float) -> int:
    """Fewest devices that finish `device_seconds` of work within `seconds`."""
    if seconds <= 0:
        raise PlannerError(f"a deadline of {seconds:g} seconds is not a positive time.")
    return ceil(device_seconds / seconds - 1e-9)


def rule_of_thumb_hours(*, billion_tokens: float, billion_parameters: float, epochs: float = 1) -> float:
    """GPU-hours on A100 80 GB as people quote them: 13.3 x billions of tokens x epochs x billions of parameters."""
    return 13.3 * billion_tokens * epochs * billion_parameters


def rule_of_thumb_constant(*, peak: float = A100_PEAK, share: float = RULE_SHARE) -> float:
    """Where 13.3 comes from: 6 FLOPs per parameter and token, at 40% of an A100's 312 TFLOP/s, in hours per 1e18."""
    return 6e18 / (share * peak) / 3600


def inference_devices(*, output_tokens: float, tokens_per_second: float, requests_per_minute: float) -> float:
    """Devices that answer `requests_per_minute` of `output_tokens` each, where one makes `tokens_per_second`."""
    if tokens_per_second <= 0:
        raise PlannerError(f"tokens per second of one device must be positive, not {tokens_per_second:g}.")
    return output_tokens / tokens_per_second * requests_per_minute / 60
