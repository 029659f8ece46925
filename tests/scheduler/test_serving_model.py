"""Waiting for another's load, measured both ways in a model of an engine: one prefix, and the convoy."""

from tests.scheduler.serving_model import LINK, burst, documents, long_first, results, tree


def test_one_prefix_is_loaded_once_and_all_answer_sooner() -> None:
    found = dict(results(burst, policies=("4", "never")))
    waiting, never = found["4"], found["never"]
    assert waiting.loaded == 8192 and never.loaded == 64 * 8192
    assert waiting.p99_ms < 0.25 * never.p99_ms and waiting.peak < 0.1 * never.peak


def test_what_groups_share_is_loaded_once_a_group_or_so() -> None:
    found = dict(results(tree, policies=("4", "never")))
    assert found["4"].mean_ms < 0.5 * found["never"].mean_ms and found["4"].loaded < 0.5 * found["never"].loaded


def test_no_convoy_behind_a_long_load() -> None:
    """Short prompts that begin like a document: waiting for all loads costs them more than loading 2,048 tokens."""
    for link, one in ((LINK, 1.0), (LINK, 0.125)):
        found = dict(results(long_first, link, one, ("4", "never", "always")))
        assert found["always"].mean_ms > 1.5 * found["never"].mean_ms
        assert found["4"].mean_ms < 1.15 * found["never"].mean_ms


def test_a_common_beginning_of_long_documents_delays_none() -> None:
    for one in (1.0, 0.125):
        found = dict(results(documents, one=one, policies=("4", "never")))
        assert found["4"].end_s < 1.01 * found["never"].end_s
