"""Lustre and EFA: the client's state, the layout that segments get, and the room on each OST."""

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvtier.doctor.host import Diagnosis, Host
from kvtier.runtime.units import size

STRIPES, STRIPE = 8, "4M"  # layout to ask for: stripes at most, and the stripe size as `lfs setstripe` takes it
STRIPES_MIN = 4  # stripes below which the layout is warned of, where there are so many OSTs
USED_MAX = 95  # use of the fullest OST, percent
UNEVEN = 10  # percent by which the fullest OST exceeds the mean use before it is warned of
FOLDERS_MAX = 64  # folders of namespaces whose layout is read

# (parameter, least, what to set). Lustre's 8 RPCs of 4 MiB to a target hold direct I/O at 32 MiB in flight;
# max_mod_rpcs_in_flight bounds creates and unlinks at the MDT, and must stay below mdc's max_rpcs_in_flight.
TUNABLES = (
    ("osc.*.max_rpcs_in_flight", 32, 64),
    ("mdc.*.max_rpcs_in_flight", 32, 64),
    ("mdc.*.max_mod_rpcs_in_flight", 16, 50),
)


class Component(NamedTuple):
    """A part [start, end) of a layout; end None: to the end of the file. stripes -1: all OSTs, 0: on the MDT."""

    start: int
    end: int | None
    stripes: int
    stripe_bytes: int
    on_mdt: bool

    def bytes_of(self, file_bytes: int) -> int:
        """Return the bytes of a file of that size that this component stores."""
        return max(0, min(file_bytes, file_bytes if self.end is None else self.end) - self.start)


class Ost(NamedTuple):
    """One line of `lfs df`. free_bytes None: the OST is inactive or does not answer."""

    name: str
    used_bytes: int
    free_bytes: int | None

    @property
    def used_percent(self) -> float:
        room = self.used_bytes + (self.free_bytes or 0)
        return 100 * self.used_bytes / room if room else 100.0


def examine_efa(host: Host, on_lustre: bool) -> Iterator[Diagnosis]:
    """Judge EFA. Return nothing where there is neither EFA nor Lustre."""
    found = sorted((host.sys / "class/infiniband").glob("*"))
    devices = [path.name for path in found if (path / "device/driver").resolve().name == "efa"]
    if not devices and not on_lustre:
        return
    value = f"{len(devices)} devices ({', '.join(devices)})" if devices else "none"
    if not devices or not on_lustre:
        yield Diagnosis("ok", "EFA", value)
        return
    nids = _nids(host)
    efa = [nid for nid in nids if re.search(r"@efa\d*$", nid)]
    if efa:
        yield Diagnosis("ok", "EFA", f"{value}; Lustre's NIDs on it: {', '.join(efa)}")
        return
    fix = (
        f"Lustre goes through {', '.join(nids) or 'no network that lnetctl shows'}: `lnetctl net add --net efa --if "
        f"{devices[0]}`, with a client that has kefalnd (FSx for Lustre: 'Configuring EFA clients')"
    )
    yield Diagnosis("warn", "EFA", f"{value}; no NID of Lustre is on it", fix)


def _nids(host: Host) -> list[str]:
    """Return the NIDs of this client, without the loopback."""
    shown = host.run("lnetctl", "net", "show")
    listed = shown if shown.status == 0 else host.run("lctl", "list_nids")
    found = re.findall(r"\S+@[a-z][a-z0-9]*", listed.output)
    return [nid for nid in found if not nid.endswith("@lo")]


def examine_lustre(host: Host, folder: Path, segment_bytes: int) -> Iterator[Diagnosis]:
    """Judge layout, OSTs and the client's parameters. `folder`: `<root>/v2`, or the nearest that exists; on Lustre."""
    if shutil.which("lfs") is None:
        setstripe = _setstripe(STRIPES, [folder])
        yield Diagnosis("warn", "Lustre stripes", "unknown: there is no lfs here", f"where there is one: {setstripe}")
    else:
        osts, fault = _osts(host, folder)
        yield _layout(host, folder, segment_bytes, sum(ost.free_bytes is not None for ost in osts))
        yield _room(osts, segment_bytes, fault)
    for parameter, least, better in TUNABLES:
        yield _tunable(host, parameter, least, better)


def _layout(host: Host, folder: Path, segment_bytes: int, n_osts: int) -> Diagnosis:
    """Judge the layout of new segments. A folder keeps the layout that its parent had when it was made, so the folders
    of namespaces tell, not `<root>/v2`. n_osts 0: not known."""
    wanted = min(STRIPES, n_osts) if n_osts else STRIPES
    folders = _folders(folder)
    fix = _setstripe(wanted, [folder, *folders] if folders else [folder])
    layouts = []
    for place in folders or [folder]:
        ran = host.run("lfs", "getstripe", "-d", str(place))
        components = parse_layout(ran.output)
        if ran.status != 0 or not components:
            said = " ".join((ran.error or ran.output).split()) or f"exit status {ran.status}"
            return Diagnosis("warn", "Lustre stripes", f"unknown: {said}", fix)
        layouts.append((_stripes_of(components, segment_bytes, n_osts), components, place))
    stripes, components, place = min(layouts, key=lambda found: (found[0], not found[1][0].on_mdt))
    value = _described(components, segment_bytes, stripes, n_osts)
    if len(layouts) > 1 and len({found[1] for found in layouts}) > 1:
        value += f" (in {place.name}; other folders have another layout)"
    if any(component.on_mdt for component in components):
        mdt_bytes = sum(component.bytes_of(segment_bytes) for component in components if component.on_mdt)
        value += f"; {size(mdt_bytes)} of each segment are stored on the MDT (DoM)"
        return Diagnosis("warn", "Lustre stripes", value, fix)
    if stripes < min(STRIPES_MIN, wanted):
        return Diagnosis("warn", "Lustre stripes", value, fix)
    return Diagnosis("ok", "Lustre stripes", value)


def _setstripe(stripes: int, folders: Sequence[Path]) -> str:
    named = " ".join(str(folder) for folder in folders[:1]) + (f" {folders[0]}/*/" if len(folders) > 1 else "")
    return f"`lfs setstripe -c {stripes} -S {STRIPE} {named}` (for new segments: files keep the layout they have)"


def _folders(folder: Path) -> list[Path]:
    """Return the folders of namespaces in `<root>/v2`."""
    try:
        found = [path for path in folder.iterdir() if re.fullmatch(r"[0-9a-f]{32}", path.name) and path.is_dir()]
    except OSError:
        return []
    return sorted(found)[:FOLDERS_MAX]


def parse_layout(text: str) -> tuple[Component, ...]:
    """Read the answer of `lfs getstripe -d`: one component of a plain layout, several of a composite one."""
    found = []
    for part in re.split(r"^\s*lcme_id:", text, flags=re.MULTILINE):
        count = re.search(r"stripe_count:\s*(-?\d+)", part)
        if count is None:
            continue
        stripe_bytes = re.search(r"stripe_size:\s*(\d+)", part)
        start = re.search(r"e_start:\s*(\d+)", part)
        end = re.search(r"e_end:\s*(\d+)", part)
        on_mdt = re.search(r"pattern:\s*mdt\b", part) is not None
        found.append(
            Component(
                int(start[1]) if start else 0,
                int(end[1]) if end else None,
                0 if on_mdt else int(count[1]) or 1,
                int(stripe_bytes[1]) if stripe_bytes else 0,
                on_mdt,
            )
        )
    return tuple(found)


def _stripes_of(components: Sequence[Component], segment_bytes: int, n_osts: int) -> int:
    """Return the number of OSTs that half of a segment's bytes or more are spread over."""
    counted = sorted((_real(component.stripes, n_osts), component.bytes_of(segment_bytes)) for component in components)
    left = segment_bytes / 2
    for stripes, n_bytes in reversed(counted):
        left -= n_bytes
        if left <= 0:
            return stripes
    return counted[0][0]


def _real(stripes: int, n_osts: int) -> int:
    """Return the OSTs that a file gets: as many as there are at most. Where that is not known, as many as are named."""
    if not n_osts:
        return 1 << 16 if stripes == -1 else stripes
    return n_osts if stripes == -1 else min(stripes, n_osts)


def _described(components: Sequence[Component], segment_bytes: int, stripes: int, n_osts: int) -> str:
    among = f" of {n_osts} OSTs" if n_osts else " OSTs"
    used = [component for component in components if component.bytes_of(segment_bytes)]
    if len(used) == 1 and not used[0].on_mdt:
        named = "all" if stripes == 1 << 16 else str(stripes)
        layout = "plain" if len(components) == 1 else f"progressive, {len(components)} components"
        return f"{named}{among} in stripes of {size(used[0].stripe_bytes)} ({layout})"
    parts = [
        f"{size(component.bytes_of(segment_bytes))} on "
        + ("the MDT" if component.on_mdt else "all OSTs" if component.stripes == -1 else f"{component.stripes} OST")
        for component in used
    ]
    return f"a segment of {size(segment_bytes)} has {', '.join(parts)}{f', of {n_osts} OSTs' if n_osts else ''}"


def _osts(host: Host, folder: Path) -> tuple[list[Ost], str]:
    """Return the OSTs, and why none are known where that is so."""
    ran = host.run("lfs", "df", str(folder))
    osts = parse_df(ran.output)
    if not osts:
        return [], " ".join((ran.error or ran.output).split()) or f"exit status {ran.status}"
    return osts, ""


def parse_df(text: str) -> list[Ost]:
    """Read the OSTs out of the answer of `lfs df`, which counts in KiB."""
    found = []
    for line in text.splitlines():
        match = re.match(r"(\S+-OST[0-9a-f]{4})_UUID\s*(.*)", line)
        if match is None:
            continue
        numbers = re.match(r"(\d+)\s+(\d+)\s+(\d+)\s", match[2])
        if numbers is None:  # "inactive device", "Resource temporarily unavailable"
            found.append(Ost(match[1], 0, None))
        else:
            found.append(Ost(match[1], int(numbers[2]) << 10, int(numbers[3]) << 10))
    return found


def _room(osts: Sequence[Ost], segment_bytes: int, fault: str) -> Diagnosis:
    """Name the fullest OST: statvfs answers the sum of all."""
    active = [ost for ost in osts if ost.free_bytes is not None]
    if not active:
        said = fault or "no OST is active"
        return Diagnosis("warn", "Lustre OSTs", f"unknown: {said}", "run `lfs df`; an OST that is away stops it")
    fullest = max(active, key=lambda ost: ost.used_percent)
    free = fullest.free_bytes or 0
    total = sum(ost.free_bytes or 0 for ost in active)
    value = (
        f"{len(active)}; the fullest is {fullest.name}, {fullest.used_percent:.0f} % used, {size(free)} free "
        f"({size(total)} on all)"
    )
    away = [ost.name for ost in osts if ost.free_bytes is None]
    if away:
        fix = "records on it are misses until it is back: ask for it (`lctl dl`), or `lctl set_param osc.*.active=1`"
        return Diagnosis("warn", "Lustre OSTs", f"{value}; {', '.join(away)} inactive", fix)
    mean = 100 * sum(ost.used_bytes for ost in active) / max(sum(ost.used_bytes for ost in active) + total, 1)
    is_uneven = fullest.used_percent >= mean + UNEVEN
    if is_uneven and (fullest.used_percent >= USED_MAX or free < segment_bytes):
        fix = (
            "a save there fails as on a full disk although the sum shows room: move files away (`lfs migrate`), "
            f"or lower capacity_bytes by {size(total - free * len(active))}"
        )
        return Diagnosis("warn", "Lustre OSTs", value, fix)
    return Diagnosis("ok", "Lustre OSTs", value)


def _tunable(host: Host, parameter: str, least: int, better: int) -> Diagnosis:
    setting = f"`lctl set_param {parameter}={better}` (add -P on the MGS to keep it)"
    if "max_mod" in parameter:
        setting += "; it must be below mdc.*.max_rpcs_in_flight and at most what the MDT allows a client"
    ran = host.run("lctl", "get_param", "-n", parameter)
    values = [int(line) for line in ran.output.split() if line.isdigit()]
    if ran.status != 0 or not values:
        said = " ".join(ran.error.split()) or f"exit status {ran.status}"
        return Diagnosis("warn", f"Lustre {parameter}", f"unknown: {said}", setting)
    if min(values) < least:
        return Diagnosis("warn", f"Lustre {parameter}", str(min(values)), setting)
    return Diagnosis("ok", f"Lustre {parameter}", str(min(values)))
