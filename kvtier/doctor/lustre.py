"""Lustre and EFA: the client's state, and what to set for segments (large files, read in large pieces, directly)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kvtier.doctor.host import Host, Verdict

STRIPES_MIN, STRIPE = 4, "4M"
"""A file on one target is as fast as that target, and files of one stripe hash to targets unevenly."""

TUNABLES = (("osc.*.max_rpcs_in_flight", 32, 64), ("mdc.*.max_rpcs_in_flight", 32, 64))
"""(parameter, least, what to set). Lustre's 8 RPCs of 4 MiB a target hold direct I/O at 32 MiB in flight."""


def examine_efa(host: Host, on_lustre: bool) -> Iterator[Verdict]:
    """Nothing where there is neither EFA nor Lustre."""
    found = sorted((host.sys / "class/infiniband").glob("*"))
    devices = [path.name for path in found if (path / "device/driver").resolve().name == "efa"]
    if not devices and not on_lustre:
        return
    value = f"{len(devices)} devices ({', '.join(devices)})" if devices else "none"
    if not devices or not on_lustre:
        yield Verdict("ok", "EFA", value)
        return
    nids = _nids(host)
    efa = [nid for nid in nids if re.search(r"@efa\d*$", nid)]
    if efa:
        yield Verdict("ok", "EFA", f"{value}; Lustre's NIDs on it: {', '.join(efa)}")
        return
    fix = (
        f"Lustre goes through {', '.join(nids) or 'no network that lnetctl shows'}: `lnetctl net add --net efa --if "
        f"{devices[0]}`, with a client that has kefalnd (FSx for Lustre: 'Configuring EFA clients')"
    )
    yield Verdict("warn", "EFA", f"{value}; no NID of Lustre is on it", fix)


def _nids(host: Host) -> list[str]:
    """The NIDs of this client, but for the loop-back."""
    shown = host.run("lnetctl", "net", "show")
    listed = shown if shown.status == 0 else host.run("lctl", "list_nids")
    found = re.findall(r"\S+@[a-z][a-z0-9]*", listed.output)
    return [nid for nid in found if not nid.endswith("@lo")]


def examine_lustre(host: Host, folder: Path) -> Iterator[Verdict]:
    """`folder`: where segments are made, or the nearest that exists; it is on Lustre."""
    yield _stripes(host, folder)
    for parameter, least, better in TUNABLES:
        yield _tunable(host, parameter, least, better)


def _stripes(host: Host, folder: Path) -> Verdict:
    setstripe = f"`lfs setstripe -c 8 -S {STRIPE} {folder}` (for new segments: files keep the layout they have)"
    if not host.has("lfs"):
        return Verdict("warn", "Lustre stripes", "unknown: there is no lfs here", f"where there is one: {setstripe}")
    ran = host.run("lfs", "getstripe", "-d", str(folder))
    counts = [int(count) for count in re.findall(r"stripe_count:\s*(-?\d+)", ran.output)]
    sizes = re.findall(r"stripe_size:\s*(\d+)", ran.output)
    if ran.status != 0 or not counts:
        said = " ".join((ran.error or ran.output).split()) or f"exit status {ran.status}"
        return Verdict("warn", "Lustre stripes", f"unknown: {said}", setstripe)
    stripes = -1 if -1 in counts else max(counts)
    value = f"{'all targets' if stripes == -1 else stripes} of {sizes[-1] if sizes else '?'} bytes"
    if stripes == -1 or stripes >= STRIPES_MIN:
        return Verdict("ok", "Lustre stripes", value)
    return Verdict("warn", "Lustre stripes", value, setstripe)


def _tunable(host: Host, parameter: str, least: int, better: int) -> Verdict:
    setting = f"`lctl set_param {parameter}={better}` (add -P on the MGS to keep it)"
    ran = host.run("lctl", "get_param", "-n", parameter)
    values = [int(line) for line in ran.output.split() if line.isdigit()]
    if ran.status != 0 or not values:
        said = " ".join(ran.error.split()) or f"exit status {ran.status}"
        return Verdict("warn", f"Lustre {parameter}", f"unknown: {said}", setting)
    if min(values) < least:
        return Verdict("warn", f"Lustre {parameter}", str(min(values)), setting)
    return Verdict("ok", f"Lustre {parameter}", str(min(values)))
