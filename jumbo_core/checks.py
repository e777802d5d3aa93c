"""Checks of constructor options: each returns the value in its plain Python type or says what was expected."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence


def integer(name: str, value, least: int = 1) -> int:
    """An integer (NumPy's included, bool not) of at least ``least``."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return number


def pair(name: str, value) -> tuple[int, int]:
    """(height, width) of an integer or a pair of integers, each at least 1."""
    sides = value if isinstance(value, Sequence) and not isinstance(value, str) else (value, value)
    if len(sides) != 2:
        raise ValueError(f"{name} must be an integer or (height, width), got {value!r}")
    return integer(name, sides[0]), integer(name, sides[1])


def positive(name: str, value) -> float:
    """A finite number above 0."""
    number = _number(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return number


def rate(name: str, value) -> float:
    """A rate in [0, 1)."""
    number = _number(value)
    if not 0 <= number < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {value!r}")
    return number


def flag(name: str, value) -> bool:
    """True or False, nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def _number(value) -> float:
    if isinstance(value, (bool, str)) or value is None:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
