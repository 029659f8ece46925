"""Pins and run-time quotas outlive the index: the root has them too, and a rebuild restores them."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.admin.change import add_pin, drop_pin, drop_quota, list_pins, list_quotas, set_quota, tenant_note
from kvtier.admin.opened import NotThere, Opened, open_for_admin
from kvtier.cli import main
from kvtier.config.settings import Settings
from kvtier.errors import IndexUnavailable, TierUnavailable
from kvtier.eviction import pins_backup
from kvtier.eviction.limits import namespace_note
from kvtier.index.open import open_index
from kvtier.maintenance.sweeper import Sweeper
from kvtier.storage.root import NOTES_FOLDER, remove_leftovers
from tests.redis_server import GENEROUS_MS, has_redis, standalone
from tests.support.rig import Engine
from tests.waiting import wait_until

NAMESPACE = bytes(range(16))
SMALL = {"segment_bytes": "64KiB", "capacity_bytes": "1MiB"}


class Place:
    def __init__(self, path: Path, index: dict[str, object], lose: Callable[[], object]) -> None:
        self.settings = Settings.load({"root": str(path / "kv"), "index": index, **SMALL})
        self.lose = lose

    def open(self) -> Opened:
        return open_for_admin(self.settings)


@pytest.fixture(params=["embedded", pytest.param("redis", marks=has_redis)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "embedded":
        yield Place(tmp_path, {}, lambda: shutil.rmtree(tmp_path / "kv/v2/index"))
        return
    with standalone(tmp_path / "redis") as server:
        index: dict[str, object] = {"kind": "redis", "url": server.url}
        patient = {"reply_timeout_ms": GENEROUS_MS, "connect_timeout_ms": GENEROUS_MS}
        yield Place(tmp_path, index | patient, lambda: server.cli("flushall"))


def rebuild(opened: Opened) -> pins_backup.Restored:
    done = Sweeper(opened.index, opened.root.folder, "test").rebuild()
    assert done is not None
    return done.restored


def fill(opened: Opened) -> None:
    """A pin for good, one for an hour and one that has expired; three quotas."""
    for label, ttl_s in (("for good", None), ("an hour", 3600.0), ("over", 0.01)):
        add_pin(opened, NAMESPACE, None, label, ttl_s)
    set_quota(opened, tenant_note("sé arch"), 10 << 20)
    set_quota(opened, tenant_note("sé arch"), 20 << 20)
    set_quota(opened, tenant_note("ads"), None)
    set_quota(opened, namespace_note(NAMESPACE), 30 << 20)


def seen(opened: Opened) -> tuple[list[str], dict[str, int | None]]:
    return [pin.label for pin in list_pins(opened).pins], {
        row.of: row.quota_bytes for row in list_quotas(opened).quotas if row.is_run_time
    }


def test_they_are_restored_with_an_index_that_lost_all(place: Place) -> None:
    opened = place.open()
    fill(opened)
    time.sleep(0.02)
    before = seen(opened)
    assert before == (["for good", "an hour"], {"sé arch": 20 << 20, "ads": None, NAMESPACE.hex(): 30 << 20})
    opened.close()
    place.lose()
    opened = place.open()
    assert seen(opened) == ([], {})
    assert rebuild(opened) == (2, 3)
    assert seen(opened) == before
    assert rebuild(opened) == (0, 0)
    files = list((opened.root.folder / NOTES_FOLDER).iterdir())
    assert len(files) == 5 and all(file.stat().st_mode & 0o777 == 0o600 for file in files), "the expired one has gone"
    opened.close()


def test_what_was_dropped_is_not_restored(place: Place) -> None:
    opened = place.open()
    fill(opened)
    for pin in list_pins(opened).pins:
        drop_pin(opened, pin.id)
        with pytest.raises(NotThere):
            drop_pin(opened, pin.id)
    for name in (tenant_note("sé arch"), tenant_note("ads"), namespace_note(NAMESPACE)):
        drop_quota(opened, name)
        with pytest.raises(NotThere):
            drop_quota(opened, name)
    opened.close()
    place.lose()
    opened = place.open()
    assert rebuild(opened) == (0, 0) and seen(opened) == ([], {})
    opened.close()


def test_an_engine_restores_them_by_itself(place: Place) -> None:
    opened = place.open()
    fill(opened)
    opened.close()
    place.lose()
    engine = Engine(place.settings.root, changes={"index": place.settings.index.model_dump()})
    opened = place.open()
    wait_until(lambda: seen(opened)[0] == ["for good", "an hour"], "the pins")
    opened.close()
    engine.close()


def test_a_rebuild_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = Place(tmp_path, {}, lambda: None)
    opened = place.open()
    add_pin(opened, NAMESPACE, None)
    opened.close()
    shutil.rmtree(tmp_path / "kv/v2/index")
    assert main(["index", "rebuild", str(place.settings.root)]) == 0
    assert "1 pin and 0 quotas that the index had lost were restored" in capsys.readouterr().out
    assert main(["index", "rebuild", str(place.settings.root)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1, "it said that nothing was restored"


def test_strange_files_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = Place(tmp_path, {}, lambda: None).open()
    fill(opened)
    folder = opened.root.folder / NOTES_FOLDER
    for number, text in enumerate(
        (
            "{",
            "[]",
            '{"name": "worker/x", "value": "", "expires_s": null}',
            '{"name": "pin/1", "value": 5, "expires_s": null}',
            '{"name": "pin/1", "value": "{}", "expires_s": NaN}',
            '{"name": "pin/1", "value": "{}", "expires_s": 1' + "0" * 400 + "}",
            '{"name": 5, "value": "{}", "expires_s": null}',
            '{"name": "pin/' + "1" * 200 + '", "value": "{}", "expires_s": null}',
            '{"name": "pin/1", "expires_s": null}',
            "[" * 100_000,
            "x" * 5,
        )
    ):
        (folder / f"{number}.json").write_text(text)
    (folder / "link.json").symlink_to("/etc/passwd")
    (folder / f".a.json.{'0' * 32}").write_text("a draft")
    opened.index.clear()
    for name in opened.index.notes("", opened.clock()):
        opened.index.drop_note(name)
    assert rebuild(opened)[1] == 3
    assert sum("is ignored" in record.message for record in caplog.records) == 12
    remove_leftovers(opened.root.folder, time.time() + 60)
    assert not list(folder.glob(".*"))
    opened.close()


def test_what_cannot_be_kept_is_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path, {}, lambda: None)
    opened = place.open()
    (opened.root.folder / NOTES_FOLDER).write_text("in the way")
    with pytest.raises(TierUnavailable, match="nothing was changed"):
        set_quota(opened, tenant_note("a"), 1 << 20)
    assert seen(opened) == ([], {})
    (opened.root.folder / NOTES_FOLDER).unlink()
    (tmp_path / "others").mkdir()
    (opened.root.folder / NOTES_FOLDER).symlink_to(tmp_path / "others")
    with pytest.raises(TierUnavailable, match="is a link"):
        set_quota(opened, tenant_note("a"), 1 << 20)
    assert rebuild(opened) == (0, 0), "nothing is read through a link"
    (opened.root.folder / NOTES_FOLDER).unlink()
    set_quota(opened, tenant_note("a"), 1 << 20)
    (file,) = (opened.root.folder / NOTES_FOLDER).iterdir()
    file.rename(tmp_path / "file")
    file.mkdir()
    with pytest.raises(TierUnavailable, match="nothing was changed"):
        drop_quota(opened, tenant_note("a"))
    file.rmdir()
    (tmp_path / "file").rename(file)

    def down(*_: object) -> None:
        raise IndexUnavailable("gone")

    index = open_index(place.settings, opened.root)
    with monkeypatch.context() as patched:
        patched.setattr(index, "put_note", down)
        for name in ("a", "b"):
            with pytest.raises(IndexUnavailable):
                pins_backup.put(index, opened.root.folder, tenant_note(name), b'{"bytes": 2}', None)
    for name in opened.index.notes("", opened.clock()):
        opened.index.drop_note(name)
    rebuild(opened)
    assert seen(opened) == ([], {"a": 1 << 20})
    index.close()
    opened.close()
