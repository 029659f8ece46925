"""What the routes answer, over a root that an engine filled."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pytest import Subtests

from kvtier.admin.lookup import TOKENS_MAX
from kvtier.errors import ConfigError
from kvtier.eviction.set_removal import Remover
from kvtier.format.namespace import chunk_keys, join_extras, salt_extra
from kvtier.index.base import SetInfo
from kvtier.runtime.metrics import HELP
from kvtier.server import service as service_module
from tests.damage import flip_slab
from tests.server.serving import CHUNK_TOKENS, CHUNKS, OWNER, PROMPT, Filled, Serving, more_sets, serving
from tests.server.test_all_routes import assert_problem
from tests.waiting import wait_until


def ok(served: Serving, method: str, path: str, **options: Any) -> Any:
    answer = served.call(method, path, **options)
    assert answer.status_code < 300, answer.text
    return answer.json() if answer.content else None


def evict(served: Serving, **wanted: Any) -> Any:
    return ok(served, "POST", "/api/v1/evict", json=wanted)


def stored(served: Serving) -> set[str]:
    return {f"{info.set_id:016x}" for info in served.index.sets()}


# --- looking ---


def test_overview(served: Serving) -> None:
    seen = ok(served, "GET", "/api/v1/overview")
    assert seen["index"]["chunks"] == CHUNKS and seen["deployment"]["root"] == str(served.filled.path)
    (space,) = seen["namespaces"]
    assert (space["id"], space["kv"], space["codec"]) == (served.filled.namespace, "4x4 float32", "raw")
    assert space["model"] == "a-model" and space["n_bytes"] == seen["capacity"]["used_bytes"] > 0
    assert seen["rates"]["hit_ratio"] == 0.75 and seen["rates"]["load_bytes_s"] == pytest.approx(5e5)
    assert [(tier["tier"], tier["used_bytes"]) for tier in seen["tiers"]][0] == ("host", 40)
    assert seen["read_ceiling_bytes_s"] == 2e9 and seen["latencies"]["lookup"]["count"] == 1
    assert seen["workers"][0]["report"]["owner"] == OWNER
    assert seen["top_prefixes"][0] | {"tokens": 512, "hits": 1, "workers": 1} == seen["top_prefixes"][0]
    assert {"workers", "top_prefixes"}.isdisjoint(ok(served, "GET", "/api/v1/stats"))


def test_many_readers_ask_the_index_no_more_than_one(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "FRESH_S", 3600.0)
    with serving(filled, history_s=3600.0) as served:
        see_the_first_point(served)
        asked = counted(served, monkeypatch, "sets")
        served.service.changed()
        for _ in range(5):
            ok(served, "GET", "/api/v1/overview")
        assert len(asked) == 1


def test_the_index_is_asked_once_for_each_thing(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"namespace": filled.namespace, "tokens": PROMPT}
    with serving(filled, history_s=3600.0) as served:
        see_the_first_point(served)
        asked = {name: counted(served, monkeypatch, name) for name in ("sets", "resolve")}
        for method, path, body, expected in (
            ("POST", "/api/v1/lookup", {"tokens": PROMPT}, {"sets": 1, "resolve": 1}),
            ("POST", "/api/v1/pins", wanted, {"sets": 1, "resolve": 1}),
            ("POST", "/api/v1/pins", wanted, {"sets": 1, "resolve": 2}),  # one lookup a pin
            ("GET", "/api/v1/pins", None, {"sets": 1, "resolve": 2}),
        ):
            for calls in asked.values():
                calls.clear()
            ok(served, method, path, json=body)
            assert {name: len(calls) for name, calls in asked.items()} == expected, (method, path)


def see_the_first_point(served: Serving) -> None:
    """Of the history, which the service takes by itself; the next one comes when `history_s` is over."""
    wait_until(served.service.history)


def counted(served: Serving, monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Grows by one with each call of the index's method."""
    calls: list[int] = []
    real = getattr(served.index, name)
    monkeypatch.setattr(served.index, name, lambda *arguments: calls.append(1) or real(*arguments))
    return calls


def test_history_grows_and_a_time_without_an_index_leaves_a_gap(filled: Filled) -> None:
    with serving(filled, history_s=3600.0) as served:
        see_the_first_point(served)
        served.index.is_down = True
        served.service.changed()
        served.service.add_point()
        served.index.is_down = False
        assert len(served.service.history()) == 1
        served.service.add_point()
        points = ok(served, "GET", "/api/v1/history")["points"]
        assert len(points) == 2 and points[-1]["workers"] == 1 and points[-1]["hit_ratio"] == 0.75


def test_lookup_finds_what_the_engine_saved(served: Serving) -> None:
    answer = ok(served, "POST", "/api/v1/lookup", json={"tokens": [*PROMPT, 1, 2, 3]})
    (hit,) = answer["hits"]
    assert answer["tokens"] == len(PROMPT) + 3 and hit["namespace"] == served.filled.namespace
    assert (hit["chunks"], hit["hit_chunks"], hit["hit_tokens"]) == (CHUNKS, CHUNKS, len(PROMPT))
    assert hit["last_key"] == served.filled.keys[-1]
    (place,) = hit["sets"]
    assert (place["set_id"], place["first_chunk"], place["chunks"]) == (served.set_id(), 0, CHUNKS)
    (file,) = place["files"]
    assert (served.filled.path / "v2" / served.filled.namespace / file).is_file()


def test_lookup_of_a_part_and_of_nothing(served: Serving) -> None:
    part = PROMPT[: 2 * CHUNK_TOKENS] + [9] * 200
    (hit,) = ok(served, "POST", "/api/v1/lookup", json={"tokens": part})["hits"]
    assert (hit["hit_chunks"], hit["chunks"]) == (2, len(part) // CHUNK_TOKENS)
    for tokens, salt in (([9] * 200, ""), ([], ""), (PROMPT[:63], ""), (PROMPT, "somebody")):
        (hit,) = ok(served, "POST", "/api/v1/lookup", json={"tokens": tokens, "cache_salt": salt})["hits"]
        assert hit["hit_chunks"] == 0 and hit["last_key"] is None and hit["sets"] == []


def test_lookup_with_a_salt_asks_for_the_connectors_keys(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    monkeypatch.setattr(served.index, "resolve", lambda keys: asked.extend(keys) or [])
    ok(served, "POST", "/api/v1/lookup", json={"tokens": PROMPT, "cache_salt": "tenant-7"})
    extras = {0: join_extras([salt_extra("tenant-7")])}
    assert asked == chunk_keys(bytes.fromhex(served.filled.namespace), PROMPT, CHUNK_TOKENS, extras)


def test_lookup_in_a_namespace(served: Serving) -> None:
    asked = {"tokens": PROMPT, "namespace": served.filled.namespace}
    assert ok(served, "POST", "/api/v1/lookup", json=asked)["hits"][0]["hit_chunks"] == CHUNKS
    assert_problem(served.call("POST", "/api/v1/lookup", json={**asked, "namespace": "0" * 32}), 404)
    assert_problem(served.call("POST", "/api/v1/lookup", json={**asked, "namespace": "../../etc"}), 422)
    assert_problem(served.call("POST", "/api/v1/lookup", json={"tokens": [0] * (TOKENS_MAX + 1)}), 422)


def test_lookup_of_a_text(served: Serving, tmp_path: Path) -> None:
    said = assert_problem(served.call("POST", "/api/v1/lookup", json={"prompt": "hello"}), 409)
    assert "send token ids" in said["detail"], "no engine named a tokenizer"
    tokenizers = pytest.importorskip("tokenizers")
    words = {str(number): number for number in PROMPT} | {"?": 5000}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    ((name, note),) = served.index.notes("worker/", time.time()).items()
    served.index.put_note(name, json.dumps(json.loads(note) | {"tokenizer": str(tmp_path)}).encode(), None)
    asked = {"prompt": " ".join(map(str, PROMPT[:130]))}
    answer = ok(served, "POST", "/api/v1/lookup", json=asked)
    assert answer["tokens"] == 130 and answer["hits"][0]["hit_tokens"] == 128
    too_long = {"prompt": "1 " * (TOKENS_MAX + 1)}
    assert "at most" in assert_problem(served.call("POST", "/api/v1/lookup", json=too_long), 409)["detail"]


def test_sets_come_in_pages(served: Serving) -> None:
    made = more_sets(served.index, served.filled.namespace, 7, tenant="acme")
    everything = sorted([*made, *stored(served)])
    found: list[str] = []
    after: str | None = None
    while True:
        query = {"limit": 3} | ({} if after is None else {"after": after})
        page = ok(served, "GET", "/api/v1/segments", params=query)
        found += [row["set_id"] for row in page["sets"]]
        after = page["next_after"]
        if after is None:
            break
    assert found == sorted(set(everything)) and len(found) == 8
    mine = ok(served, "GET", "/api/v1/segments", params={"tenant": "acme"})["sets"]
    assert [row["set_id"] for row in mine] == made
    for wrong in ({"limit": 0}, {"limit": "x"}, {"after": "zz"}, {"surely": 1}, {"is_open": "perhaps"}):
        assert_problem(served.call("GET", "/api/v1/segments", params=wrong), 422)


def test_one_set_with_its_files(served: Serving) -> None:
    found = ok(served, "GET", f"/api/v1/segments/{served.set_id()}")
    (file,) = found["files"]
    assert found["records"] == CHUNKS and file["n_bytes"] > 0


# --- changing ---


def test_evict_says_first_and_does_then(served: Serving) -> None:
    mine = served.set_id()
    more_sets(served.index, served.filled.namespace, 3)
    would = evict(served, n_bytes=1 << 20)
    assert would["dry_run"] and would["n_sets"] == 1 and len(stored(served)) == 4
    done = evict(served, n_bytes=(1 << 20) + 1, dry_run=False)
    assert done["n_sets"] == 2 and done["is_complete"] and len(stored(served)) == 2
    assert mine in stored(served), "those that were used last stay"
    gone = evict(served, prefix={"namespace": served.filled.namespace, "tokens": PROMPT}, dry_run=False)
    assert [row["set_id"] for row in gone["sets"]] == [mine]
    assert not list(served.filled.path.glob("v2/*/*.kvseg"))
    assert ok(served, "POST", "/api/v1/lookup", json={"tokens": PROMPT})["hits"][0]["hit_chunks"] == 0


def test_evict_by_age_namespace_and_tenant(served: Serving) -> None:
    more_sets(served.index, served.filled.namespace, 2, tenant="acme")
    assert evict(served, unused_s=3600.0)["n_sets"] == 2
    assert evict(served, tenant="acme")["n_sets"] == 2 and evict(served, tenant="")["n_sets"] == 1
    assert evict(served, tenant="acme", n_bytes=1)["n_sets"] == 1
    assert evict(served)["n_sets"] == 3
    for unknown in ({"tenant": "acne"}, {"namespace": "0" * 32}):
        said = assert_problem(served.call("POST", "/api/v1/evict", json=unknown), 404)["detail"]
        assert "known labels: 'acme'" in said if "tenant" in unknown else "no namespace 000" in said
    assert_problem(served.call("POST", "/api/v1/evict", json={"dry_run": False}), 409)
    assert len(stored(served)) == 3


def test_what_is_open_stays_as_long_as_its_engine_lives(served: Serving) -> None:
    for number, owner in enumerate(("alive-1", "dead-1")):
        info = SetInfo(77 + number, bytes.fromhex(served.filled.namespace), owner, 1 << 20, 1.0, 1.0)
        assert served.index.create_set(info)
    served.index.acquire_lease("writer/alive-1", "alive-1", time.time(), 60.0)
    for wanted, n_sets in (({}, 2), ({"dry_run": False}, 2), ({"dry_run": False}, 0)):
        cleared = ok(served, "POST", "/api/v1/clear", json=wanted)
        assert cleared["n_sets"] == n_sets and cleared["is_complete"]
        assert cleared["kept"] == [{"why": "open", "n_sets": 1, "n_bytes": 1 << 20, "owners": ["alive-1"]}]
    assert stored(served) == {f"{77:016x}"}


def test_only_one_evicts(served: Serving) -> None:
    assert served.index.acquire_lease("evict", "another", time.time(), 60.0) is not None
    assert evict(served, n_bytes=1)["n_sets"] == 1
    answer = served.call("POST", "/api/v1/evict", json={"n_bytes": 1, "dry_run": False})
    assert_problem(answer, 429)
    assert int(answer.headers["retry-after"]) > 0


def test_two_requests_do_not_both_count_a_set_as_evicted(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both had the service's own lease, and the first to end gave it up for both."""
    wanted, removed, answers = {"dry_run": False}, Remover.remove, list[Any]()

    def remove(remover: Remover, info: SetInfo, token: int | None = None) -> int:
        if not answers:
            answers.append(None)
            answers.append(served.call("POST", "/api/v1/clear", json=wanted))
        return removed(remover, info, token)

    monkeypatch.setattr(Remover, "remove", remove)
    more_sets(served.index, served.filled.namespace, 2)
    done = ok(served, "POST", "/api/v1/clear", json=wanted)
    assert done["n_sets"] == 3 and done["is_complete"]
    assert_problem(answers[1], 429)


def test_a_pin_protects_and_is_shown(served: Serving) -> None:
    mine = served.set_id()
    more_sets(served.index, served.filled.namespace, 1)
    wanted = {"namespace": served.filled.namespace, "tokens": PROMPT, "label": "system"}
    made = ok(served, "POST", "/api/v1/pins", json=wanted)
    assert made["keys"] == CHUNKS and made["sets"] == 1 and made["n_bytes"] > 0
    (row,) = ok(served, "GET", "/api/v1/pins")["pins"]
    assert row == made
    shown = {one["set_id"]: one["is_pinned"] for one in ok(served, "GET", "/api/v1/segments")["sets"]}
    assert len(shown) == 2 and {set_id for set_id, is_pinned in shown.items() if is_pinned} == {mine}
    assert ok(served, "GET", f"/api/v1/segments/{mine}")["is_pinned"]
    assert [one["pinned_sets"] for one in ok(served, "GET", "/api/v1/overview")["namespaces"]] == [1]
    assert evict(served, namespace=served.filled.namespace)["n_sets"] == 1
    cleared = ok(served, "POST", "/api/v1/clear", json={"dry_run": False})
    assert cleared["n_sets"] == 1 and stored(served) == {mine}
    assert [(row["why"], row["n_sets"], row["n_bytes"]) for row in cleared["kept"]] == [("pinned", 1, made["n_bytes"])]
    assert ok(served, "POST", "/api/v1/clear", json={"include_pinned": True})["n_sets"] == 1
    ok(served, "DELETE", f"/api/v1/pins/{made['id']}")
    assert ok(served, "GET", "/api/v1/pins")["pins"] == []
    assert ok(served, "POST", "/api/v1/clear", json={"dry_run": False})["n_sets"] == 1 and not stored(served)


def test_a_quota_without_a_limit_is_logged_as_unlimited(served: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "kvtier"):
        for n_bytes in (None, 1 << 30):
            ok(served, "PUT", "/api/v1/quotas/tenants/acme", json={"quota_bytes": n_bytes})
    said = [record.getMessage() for record in caplog.records]
    assert said[0].endswith("acme: unlimited") and said[1].endswith("acme: 1073741824 bytes")


def test_a_pin_of_a_stranger_is_listed_whatever_its_label(served: Serving) -> None:
    note = {"namespace": served.filled.namespace, "keys": None, "label": "\udcff half", "created_s": 1}
    served.index.put_note(f"pin/{'1' * 32}", json.dumps(note).encode(), None)
    (row,) = ok(served, "GET", "/api/v1/pins")["pins"]
    assert row["label"] == "? half"
    ok(served, "DELETE", f"/api/v1/pins/{row['id']}")


def test_pins_expire(served: Serving) -> None:
    ok(served, "POST", "/api/v1/pins", json={"namespace": served.filled.namespace, "expires_in_s": 0.05})
    time.sleep(0.1)
    assert ok(served, "GET", "/api/v1/pins")["pins"] == [] and evict(served)["n_sets"] == 1


def test_pins_have_a_cap(served: Serving) -> None:
    more_sets(served.index, served.filled.namespace, 40)  # of 1 MiB, and half of 64 MiB may be pinned
    said = assert_problem(served.call("POST", "/api/v1/pins", json={"namespace": served.filled.namespace}), 409)
    assert "pinned_max_fraction" in said["detail"]
    ok(served, "POST", "/api/v1/pins", json={"namespace": served.filled.namespace, "keys": list(served.filled.keys)})


REFUSED_PINS: list[tuple[dict[str, Any], int]] = [
    ({"namespace": "0" * 32}, 404),
    ({"tokens": [1]}, 409),
    ({"tokens": PROMPT, "keys": ["0" * 32]}, 409),
    ({"keys": []}, 422),
    ({"keys": ["0"]}, 422),
    ({"expires_in_s": 0}, 422),
    ({"label": "x" * 201}, 422),
    ({"label": "a\nb"}, 409),
    ({"cache_salt": "x"}, 409),
    ({"keys": ["0" * 32], "cache_salt": "x"}, 409),
    ({"tokens": []}, 409),
    ({"tokens": [-1]}, 422),
    ({"tokens": [1 << 32]}, 422),
    ({"tokens": [True]}, 422),
]


def test_pins_that_are_refused(served: Serving, subtests: Subtests) -> None:
    for changes, status in REFUSED_PINS:
        with subtests.test(changes=changes):
            body = {"namespace": served.filled.namespace, **changes}
            assert_problem(served.call("POST", "/api/v1/pins", json=body), status)


def test_quotas_are_set_and_lifted(served: Serving) -> None:
    space = served.filled.namespace
    ok(served, "PUT", "/api/v1/quotas/tenants/acme", json={"quota_bytes": 4 << 20})
    rows = ok(served, "PUT", f"/api/v1/quotas/namespaces/{space}", json={"quota_bytes": None})["quotas"]
    assert [(row["kind"], row["of"], row["quota_bytes"], row["is_run_time"]) for row in rows] == [
        ("tenant", "acme", 4 << 20, True),
        ("namespace", space, None, True),
    ]
    assert rows[1]["used_bytes"] > 0
    assert ok(served, "GET", "/api/v1/overview")["tenants"][1]["quota_bytes"] == 4 << 20
    ok(served, "DELETE", "/api/v1/quotas/tenants/acme")
    ok(served, "DELETE", f"/api/v1/quotas/namespaces/{space}")
    assert ok(served, "GET", "/api/v1/quotas")["quotas"] == []


def test_quotas_of_labels_that_no_settings_can_have(served: Serving) -> None:
    """The limit is of bytes in UTF-8, not of characters."""
    ok(served, "PUT", "/api/v1/quotas/tenants/" + "\u00e9" * 16, json={"quota_bytes": 0})
    for label in ("\u00e9" * 17, "a%0Ab", "%20a", "%00", "%ff"):
        answer = served.call("PUT", f"/api/v1/quotas/tenants/{label}", json={"quota_bytes": 0})
        assert "is no tenant's label" in assert_problem(answer, 409)["detail"]
        assert_problem(served.call("DELETE", f"/api/v1/quotas/tenants/{label}"), 409)
    assert len(ok(served, "GET", "/api/v1/quotas")["quotas"]) == 1


def test_a_quota_that_no_segment_set_fits_into_is_refused(served: Serving) -> None:
    for of in ("tenants/acme", f"namespaces/{served.filled.namespace}"):
        path = f"/api/v1/quotas/{of}"
        for n_bytes in (1, (4 << 20) - 1):
            assert "4MiB" in assert_problem(served.call("PUT", path, json={"quota_bytes": n_bytes}), 409)["detail"]
        for n_bytes in (0, 4 << 20):
            ok(served, "PUT", path, json={"quota_bytes": n_bytes})
    assert_problem(served.call("PUT", f"/api/v1/quotas/namespaces/{'0' * 32}", json={"quota_bytes": None}), 404)


def test_a_root_that_cannot_be_opened_is_named(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ConfigError("root", "/mnt/kv", "belongs to another deployment")

    assert served.service.opened  # now no thread of the service is just opening it
    monkeypatch.setattr(served.service, "_open_root", refuse)
    monkeypatch.setattr(served.service, "_opened", None)
    said = assert_problem(served.call("GET", "/api/v1/pins"), 503)
    assert said["detail"] == "kvtier: root = '/mnt/kv': belongs to another deployment"


# --- verify ---


def verified(served: Serving) -> Any:
    path = f"/api/v1/verify/{ok(served, 'POST', '/api/v1/verify')['id']}"
    wait_until(lambda: ok(served, "GET", path)["ended_s"])
    return ok(served, "GET", path)


def test_verify_reads_all(served: Serving) -> None:
    job = verified(served)
    assert (job["state"], job["records"], job["n_bad"]) == ("done", CHUNKS, 0)
    assert job["segments_done"] == job["segments_total"] == 1
    assert [row["id"] for row in ok(served, "GET", "/api/v1/verify")["jobs"]] == [job["id"]]


def test_verify_finds_what_is_bad(served: Serving) -> None:
    (path,) = served.filled.path.glob("v2/*/*.kvseg")
    flip_slab(path, 1)
    job = verified(served)
    assert job["n_bad"] == 1 and job["bad"][0]["slot"] == 1 and "does not match" in job["bad"][0]["what"]


def test_verify_can_be_ended_and_has_a_queue(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtier.admin import verifying

    def slow(root: object, index: object, tell: Any, signer: object) -> Any:
        while True:
            tell(1, 1000)
            time.sleep(0.01)

    monkeypatch.setattr(verifying, "verify", slow)
    first = f"/api/v1/verify/{ok(served, 'POST', '/api/v1/verify')['id']}"
    wait_until(lambda: ok(served, "GET", first)["state"] != "waiting")
    more = [served.call("POST", "/api/v1/verify") for _ in range(verifying.WAITING_MAX + 1)]
    assert_problem(more[-1], 429)
    for answer in more[:-1]:
        assert ok(served, "POST", f"/api/v1/verify/{answer.json()['id']}/cancel")["state"] == "cancelled"
    ok(served, "POST", f"{first}/cancel")
    wait_until(lambda: ok(served, "GET", first)["ended_s"])
    job = ok(served, "GET", first)
    assert job["state"] == "cancelled" and job["segments_done"] == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_job_that_meets_a_bug_has_failed_and_the_next_one_runs(
    served: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtier.admin import verifying

    with monkeypatch.context() as broken:
        broken.setattr(verifying, "verify", lambda *_: 1 / 0)
        job = verified(served)
    assert job["state"] == "failed" and "a bug" in job["fault"]
    assert verified(served)["state"] == "done"


# --- Prometheus ---


def test_a_report_under_anothers_name_is_none(served: Serving) -> None:
    """Two engines of one name would be the same series twice, and Prometheus takes none of the two."""
    ((name, note),) = served.index.notes("worker/", time.time()).items()
    served.index.put_note(name + "-twin", note, None)
    served.service.changed()
    seen = ok(served, "GET", "/api/v1/overview")
    assert (len(seen["workers"]), seen["unreadable_reports"]) == (1, 1)
    text = served.call("GET", "/metrics").text
    assert text.count("kvtier_hit_tokens_total{") == 1


def test_a_report_of_no_time_at_all_tells_no_rate(served: Serving) -> None:
    """JSON has no infinity, so a number that the document promises was missing."""
    ((name, note),) = served.index.notes("worker/", time.time()).items()
    served.index.put_note(name, json.dumps(json.loads(note) | {"interval_s": 5e-324}).encode(), None)
    served.service.changed()
    rates = ok(served, "GET", "/api/v1/overview")["rates"]
    assert rates.pop("hit_ratio") == 0.75 and rates.pop("ttft_saved_s_per_s") is None
    assert set(rates.values()) == {0.0}


def test_prometheus_text(served: Serving) -> None:
    more_sets(served.index, served.filled.namespace, 1, tenant="acme")
    served.service.changed()
    text = served.call("GET", "/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(name.startswith("kvtier_") and family.documentation for name, family in families.items())

    def value(name: str, **labels: str) -> float:
        (sample,) = [
            s for f in families.values() for s in f.samples if s.name == name and labels.items() <= s.labels.items()
        ]
        return float(sample.value)

    assert value("kvtier_index_up") == 1 and value("kvtier_index_chunks") == CHUNKS and value("kvtier_workers") == 1
    assert value("kvtier_hit_tokens_total", worker=OWNER) == 750
    assert value("kvtier_tenant_bytes", tenant="acme") == 1 << 20
    assert value("kvtier_tier_used_bytes", tier="host") == 40
    assert value("kvtier_lookup_duration_seconds_bucket", le="+Inf") == 1
    assert value("kvtier_lookup_duration_seconds_bucket", le="0.001") == 0
    assert value("kvtier_lookup_duration_seconds_sum") == pytest.approx(0.002)
    assert text.count("# HELP") == text.count("# TYPE") == len(families)
    assert families["kvtier_stale_reads"].documentation == HELP["stale_reads"]  # as in vLLM; it said "Stale reads"
