"""Options of ``wrap``: arguments, then ``AUTOBYTE_*`` variables, then defaults."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

ENGINES = ("auto", "external")
POLICIES = ("priority", "fifo")
DEFAULT_TIMEOUT_S = 60.0
MAX_SIZE = 1 << 50  # bytes

_UNITS = {
    "": 1, "B": 1,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30,
    "KB": 10**3, "MB": 10**6, "GB": 10**9,
}  # fmt: skip


class OptionError(ValueError):
    """An option that can't be used: what was given, what is allowed."""


def parse_size(value: int | str, name: str, minimum: int = 1) -> int:
    """Bytes of a size such as ``4MiB``, ``500KB`` or ``1048576``."""
    size: float = -1
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match and match[2].upper() in _UNITS:
            size = float(match[1]) * _UNITS[match[2].upper()]
    if size < minimum or size != int(size) or size > MAX_SIZE:
        raise OptionError(
            f"{name}={value!r}: a size is whole bytes or a number with a unit (B, KB, MB, GB, KiB, MiB, GiB), "
            f"such as 1048576, '4MiB' or '500KB', from {minimum} B to {MAX_SIZE} B"
        )
    return int(size)


def parse_timeout(value: float | str, name: str) -> float:
    """Seconds."""
    try:
        seconds = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0.1 <= seconds <= 1e6:
        raise OptionError(f"{name}={value!r}: a timeout is a number of seconds from 0.1 to 1000000")
    return seconds


def _choice(value: str, name: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise OptionError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")
    return value


def _engine(value: str, name: str) -> str:
    if value == "native":
        raise OptionError(f"{name}='native': this version has no native engine; allowed are {', '.join(map(repr, ENGINES))}")
    return _choice(value, name, ENGINES)


def _count(value: int | str, name: str) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = -1
    if not 0 <= count <= 65535:
        raise OptionError(f"{name}={value!r}: a whole number from 0 to 65535 is allowed")
    return count


def is_enabled() -> bool:
    """False with ``AUTOBYTE=0``."""
    value = os.environ.get("AUTOBYTE", "1").strip().lower()
    if value in ("0", "off", "false", "no"):
        return False
    if value in ("", "1", "on", "true", "yes"):
        return True
    raise OptionError(f"AUTOBYTE={value!r}: allowed are 0 and 1")


@dataclass
class Options:
    """What the user has set; None was left to AutoByte. Sizes in bytes, timeout in seconds."""

    partition: int | None = None
    credit: int | None = None
    fusion: int | None = None
    engine: str = "auto"
    policy: str | None = None
    timeout: float = DEFAULT_TIMEOUT_S
    port: int = 0
    interface: str = ""

    def settings(self) -> dict:
        """The knobs for the library, without those that were left open."""
        knobs = {"partition": self.partition, "credit": self.credit, "fusion": self.fusion, "policy": self.policy}
        return {name: value for name, value in knobs.items() if value is not None}


_PARSERS = {
    "partition": lambda value, name: parse_size(value, name, 64),
    "credit": lambda value, name: parse_size(value, name, 1),
    "fusion": lambda value, name: parse_size(value, name, 0),
    "engine": _engine,
    "policy": lambda value, name: _choice(value, name, POLICIES),
    "timeout": parse_timeout,
    "port": _count,
    "interface": lambda value, name: value,
}
_VARIABLES = {name: f"AUTOBYTE_{name.upper()}" for name in _PARSERS} | {"interface": "AUTOBYTE_IFACE"}


def resolve(**arguments: object) -> Options:
    """Puts arguments over environment over defaults. An argument that is None counts as left out."""
    options = Options()
    for name, parse in _PARSERS.items():
        value, source = arguments.get(name), name
        if value is None:
            value, source = os.environ.get(_VARIABLES[name]) or None, _VARIABLES[name]  # an empty one is unset
        if value is not None:
            setattr(options, name, parse(value, source))
    return options
