"""A delta log in each kind of store."""

from tests.unit.log.conftest import REAL, log, place

__all__ = ["REAL", "log", "place"]
