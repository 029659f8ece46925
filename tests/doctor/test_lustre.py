"""`kvtier doctor` on Lustre, over recorded answers of lfs and lctl (`recorded/README.md`)."""

from pathlib import Path

import pytest

from kvtier.doctor.host import Diagnosis, Host
from kvtier.doctor.lustre import Component, examine_lustre, parse_df, parse_layout

RECORDED = Path(__file__).with_name("recorded")
GIB, MIB = 1 << 30, 1 << 20


def examined(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    df: str,
    mod_rpcs: str = "max_mod_rpcs.txt",
    segment_bytes: int = GIB,
) -> dict[str, Diagnosis]:
    """The verdicts over `lfs` and `lctl` that print recorded answers."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    lfs = f'case "$1" in getstripe) cat {RECORDED}/{layout};; df) cat {RECORDED}/{df};; esac'
    lctl = f'case "$3" in *max_mod*) cat {RECORDED}/{mod_rpcs};; osc*) printf "8\\n64\\n";; mdc*) echo 64;; esac'
    for name, script in {"lfs": lfs, "lctl": lctl}.items():
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    return {verdict.what: verdict for verdict in examine_lustre(Host(timeout_s=10.0), folder, segment_bytes)}


def test_as_many_stripes_as_there_are_osts_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asked for 8 where there were 2 OSTs, so that its own advice was never followed by an ok."""
    stripes = examined(tmp_path, monkeypatch, "getstripe_plain.txt", "df_2.txt")["Lustre stripes"]
    assert stripes.level == "warn" and stripes.value == "1 of 2 OSTs in stripes of 4.0 MiB (plain)"
    assert f"`lfs setstripe -c 2 -S 4M {tmp_path}`" in stripes.fix
    stripes = examined(tmp_path, monkeypatch, "getstripe_plain.txt", "df_16.txt")["Lustre stripes"]
    assert "lfs setstripe -c 8 " in stripes.fix
    stripes = examined(tmp_path, monkeypatch, "getstripe_plain_8.txt", "df_2.txt")["Lustre stripes"]
    assert stripes.level == "ok" and stripes.value == "2 of 2 OSTs in stripes of 4.0 MiB (plain)"
    stripes = examined(tmp_path, monkeypatch, "getstripe_old.txt", "df_16.txt")["Lustre stripes"]
    assert stripes.level == "warn" and stripes.value.startswith("1 of 16 OSTs")


def test_a_progressive_layout_is_judged_by_where_a_segments_bytes_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest stripe count of any component was shown, also of one that no segment reaches."""
    stripes = examined(tmp_path, monkeypatch, "getstripe_pfl_1gib.txt", "df_16.txt")["Lustre stripes"]
    assert stripes.level == "warn" and "progressive, 4 components" in stripes.value and stripes.value.startswith("1 of")
    stripes = examined(tmp_path, monkeypatch, "getstripe_pfl.txt", "df_16.txt")["Lustre stripes"]
    assert stripes.level == "ok"
    assert stripes.value == "a segment of 1.0 GiB has 100.0 MiB on 1 OST, 924.0 MiB on 8 OST, of 16 OSTs"
    small = examined(tmp_path, monkeypatch, "getstripe_pfl.txt", "df_16.txt", segment_bytes=64 * MIB)["Lustre stripes"]
    assert small.level == "warn" and small.value.startswith("1 of 16 OSTs")


def test_data_on_the_mdt_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stripes = examined(tmp_path, monkeypatch, "getstripe_dom.txt", "df_16.txt")["Lustre stripes"]
    assert stripes.level == "warn" and "1.0 MiB of each segment are stored on the MDT (DoM)" in stripes.value
    assert "1.0 MiB on the MDT, 1023.0 MiB on all OSTs" in stripes.value


def test_folders_of_namespaces_keep_the_layout_they_were_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lfs setstripe` of `<root>/v2` changes nothing for the namespaces that are there."""
    namespace = tmp_path / ("ab" * 16)
    namespace.mkdir()
    commands = tmp_path / "bin"
    commands.mkdir()
    lfs = (
        f'case "$1 $3" in "getstripe {namespace}") cat {RECORDED}/getstripe_plain.txt;; '
        f"getstripe*) cat {RECORDED}/getstripe_plain_8.txt;; *) cat {RECORDED}/df_16.txt;; esac"
    )
    (commands / "lfs").write_text(f"#!/bin/sh\n{lfs}\n")
    (commands / "lfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    stripes = next(iter(examine_lustre(Host(timeout_s=10.0), tmp_path, GIB)))
    assert stripes.level == "warn" and f"lfs setstripe -c 8 -S 4M {tmp_path} {tmp_path}/*/" in stripes.fix


def test_the_fullest_ost_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """statvfs answers the sum of the OSTs, so a full one does not show."""
    osts = examined(tmp_path, monkeypatch, "getstripe_plain_8.txt", "df_2.txt")["Lustre OSTs"]
    assert osts.level == "warn"
    assert osts.value == "2; the fullest is testfs-OST0000, 99 % used, 32.2 MiB free (3.4 GiB on all)"
    assert "lfs migrate" in osts.fix and "lower capacity_bytes by 3.3 GiB" in osts.fix
    osts = examined(tmp_path, monkeypatch, "getstripe_plain_8.txt", "df_16.txt")["Lustre OSTs"]
    assert osts.level == "ok" and osts.value.startswith("16; the fullest is testfs-OST000f, 24 % used")
    osts = examined(tmp_path, monkeypatch, "getstripe_plain_8.txt", "df_inactive.txt")["Lustre OSTs"]
    assert osts.level == "warn" and osts.value.endswith("testfs-OST0001 inactive")


def test_parameters_of_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = examined(tmp_path, monkeypatch, "getstripe_plain_8.txt", "df_16.txt")
    osc = found["Lustre osc.*.max_rpcs_in_flight"]
    assert (osc.level, osc.value) == ("warn", "8") and "lctl set_param osc.*.max_rpcs_in_flight=64" in osc.fix
    assert found["Lustre mdc.*.max_rpcs_in_flight"].level == "ok"
    mod = found["Lustre mdc.*.max_mod_rpcs_in_flight"]
    assert (mod.level, mod.value) == ("warn", "7") and "lctl set_param mdc.*.max_mod_rpcs_in_flight=50" in mod.fix


def test_commands_that_do_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", f"{commands}")
    found = {verdict.what: verdict for verdict in examine_lustre(Host(timeout_s=10.0), tmp_path, GIB)}
    assert found["Lustre stripes"].value == "unknown: there is no lfs here" and "Lustre OSTs" not in found
    for name in ("lfs", "lctl"):
        (commands / name).write_text('#!/bin/sh\necho "error: not ours" >&2; exit 2\n')
        (commands / name).chmod(0o755)
    found = {verdict.what: verdict for verdict in examine_lustre(Host(timeout_s=10.0), tmp_path, GIB)}
    assert found["Lustre stripes"].value == "unknown: error: not ours" and "-c 8" in found["Lustre stripes"].fix
    assert found["Lustre OSTs"].value == "unknown: error: not ours"
    assert found["Lustre osc.*.max_rpcs_in_flight"].value == "unknown: error: not ours"


def test_recorded_answers_are_read() -> None:
    read = {path.stem: parse_layout(path.read_text()) for path in RECORDED.glob("getstripe*.txt")}
    assert read["getstripe_plain"] == (Component(0, None, 1, 4 * MIB, False),)
    assert read["getstripe_dom"] == (Component(0, MIB, 0, MIB, True), Component(MIB, None, -1, 4 * MIB, False))
    assert [component.stripes for component in read["getstripe_pfl"]] == [1, 8, 16, 32]
    assert parse_layout("no answer") == ()
    assert [ost.free_bytes is None for ost in parse_df((RECORDED / "df_inactive.txt").read_text())] == [
        False,
        True,
        False,
    ]
