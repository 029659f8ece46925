"""The types of settings, and what they check: shared by the groups of the tree. Byte sizes are numbers or texts; so are
times."""

import re
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

FROZEN = ConfigDict(frozen=True, extra="forbid", validate_default=True)
# Not pydantic's ByteSize and timedelta, whose spellings differ: ByteSize refuses "4Gi", takes "8Gbit" and true, and
# cuts fractions of a byte ("0.3B" is 0); timedelta refuses "90s", "15m", "12h" and "2w".
_UNITS = {"": 1, "B": 1} | {
    letter + suffix: base**power
    for suffix, base in (("iB", 1024), ("i", 1024), ("B", 1000))
    for power, letter in enumerate("KMGT", start=1)
}
DAY_S = 86_400.0
TIMEOUT_S_MIN = 0.1  # least time-out: below, ordinary answers of a storage come too late
SECONDS_MAX = 3660 * DAY_S  # longest time of a setting; clocks of C libraries hold it
REQUEST_SECONDS_MAX = 1e10  # longest time that requests and commands take, seconds: 317 years
_TIME = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?) ?([smhdw]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S, "w": 7 * DAY_S}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: object) -> int:
    """Return a byte size as a number. Raises ValueError when `value` is neither a whole number nor a text like
    "64GiB"."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if not match or match[2].lower() not in units:
        raise ValueError('must be a whole number of bytes or a size such as "64GiB", "512MiB" or "64GB"')
    n_bytes = Fraction(match[1]) * units[match[2].lower()]
    if n_bytes.denominator != 1:
        raise ValueError("must be a whole number of bytes")
    return int(n_bytes)


def no_bool(value: object) -> object:
    if isinstance(value, bool):  # an int to Python, a slip in a settings file
        raise ValueError("must be a number")
    return value


def parse_seconds(value: object) -> object:
    """Read a time as "90s" or "7d"; a number is left as it is. Raises ValueError."""
    if not isinstance(value, str):
        return no_bool(value)
    match = _TIME.fullmatch(value.strip())
    if match is None:
        raise ValueError('must be a number of seconds, or a time with a unit: "90s", "15m", "12h", "7d" or "2w"')
    return float(match[1]) * _SECONDS[match[2]]


def multiple_of(unit: int, why: str) -> AfterValidator:
    """Return a validator that refuses numbers that are not multiples of `unit`."""

    def check(value: int) -> int:
        if value % unit:
            raise ValueError(f"must be a multiple of {unit} ({why}); the next one is {-(-value // unit) * unit}")
        return value

    return AfterValidator(check)


def unreadable_name(path: Path) -> str:
    """Return what to do about a path whose name is no text here, "" for any other: names are written into files."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8, or not in this locale: run this with PYTHONUTF8=1, or choose another name"
    return ""


def absolute_path(value: Path, is_secret: bool = False) -> Path:
    """Check a path. is_secret: of a file with a secret, so that a text that is no path may be the secret itself and is
    not repeated. Raises ValueError."""
    if fix := unreadable_name(value):
        raise ValueError(fix)
    if "\0" in str(value):
        raise ValueError("must be a path, and those hold no NUL byte")
    if not value.is_absolute():
        if is_secret and not str(value).startswith("~"):
            raise ValueError("must be the absolute path of a file that holds it")
        better = value.expanduser() if str(value).startswith("~") else value.absolute()
        raise ValueError(f"must be an absolute path: processes start in different folders; try {better}")
    return value


def _path_text(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not value.strip():  # Path("") is the current folder
        raise ValueError("it is empty: set it to an absolute path, or unset it")
    if "://" in value and not value.startswith("/"):  # Path("s3://x") is the folder `s3:` in the current one
        raise ValueError("it is a URL, and kvtier needs a path: set it to an absolute path on a mounted file system")
    return value


AbsolutePath = Annotated[Path, BeforeValidator(_path_text), AfterValidator(absolute_path)]
SecretPath = Annotated[Path, BeforeValidator(_path_text), AfterValidator(partial(absolute_path, is_secret=True))]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
BytesOrZero = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
Count = Annotated[int, BeforeValidator(no_bool), Field(gt=0)]
Natural = Annotated[int, BeforeValidator(no_bool), Field(ge=0)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0, le=SECONDS_MAX, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, BeforeValidator(parse_seconds), Field(ge=0, le=SECONDS_MAX, allow_inf_nan=False)]
Timeout = Annotated[float, BeforeValidator(parse_seconds), Field(ge=TIMEOUT_S_MIN, le=DAY_S, allow_inf_nan=False)]
