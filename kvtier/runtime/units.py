"""Sizes in bytes, rates and counts, as text for people."""


def counted(count: int, noun: str) -> str:
    """Write a count, as "1 namespace", "2,000 namespaces". noun: in the singular, with a plural in s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def size(n_bytes: float) -> str:
    """Return a size as "1.5 GiB"."""
    power = min(4, max(0, int(n_bytes).bit_length() - 1) // 10)
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{n_bytes / 1024**power:.{1 if power else 0}f} {unit}"


def exact(n_bytes: int) -> str:
    """Return a size as settings accept it, "64GiB" or "500GB"; other numbers as "1048577 bytes (1.0 MiB)"."""
    for base, suffix in ((1024, "iB"), (1000, "B")):
        for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
            count, rest = divmod(n_bytes, base**power)
            if not rest and 0 < count < 10_000:
                return f"{count}{letter}{suffix}"
    return f"{n_bytes} bytes" if n_bytes < 1024 else f"{n_bytes} bytes ({size(n_bytes)})"


def rate(bytes_s: float | None) -> str:
    """Write a rate as "1.5 GB/s": in 1000s, as rates of storage are given. None: not known."""
    if bytes_s is None:
        return "-"
    for unit, scale in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_s >= scale:
            return f"{significant(bytes_s / scale)} {unit}"
    return f"{significant(bytes_s / 1e3)} kB/s" if bytes_s else "0"


def significant(value: float) -> str:
    """Return a number with three significant digits, or all digits before the point: "0.25", "1,000"."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
