"""Names of `tests/parity.py` under their former address, until every branch imports them from there."""

from tests.parity import assert_same_fit, check, fit, fit_with

__all__ = ["assert_same_fit", "check", "fit", "fit_with"]
