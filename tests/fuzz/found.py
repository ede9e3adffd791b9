"""Cases that the fuzzer has found, by what was wrong."""

from tests.fuzz.draw import Case

FOUND: dict[str, Case] = {}
