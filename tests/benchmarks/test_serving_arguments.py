"""Command lines of the benchmarks that ask a server: what cannot be measured is refused before anything is asked."""

import asyncio
from functools import partial
from pathlib import Path

import httpx
import pytest

from benchmarks import aiperf_ttft, long_doc_qa
from benchmarks.serving import __main__ as serving
from benchmarks.serving import client, counters
from benchmarks.serving.server import environment
from tests.benchmarks.rounds import Wrapper


@pytest.mark.parametrize(
    ("benchmark", "flag", "value"),
    [
        (long_doc_qa, "--num-documents", "0"),
        (long_doc_qa, "--document-length", "-5"),
        (long_doc_qa, "--repeat-count", "0"),
        (long_doc_qa, "--max-inflight-requests", "0"),  # would wait for ever
        (long_doc_qa, "--floor", "-1"),
        (aiperf_ttft, "--isl", "2,0"),
        (aiperf_ttft, "--requests", "0"),
    ],
)
def test_numbers_that_are_too_small(
    benchmark: object, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.main([f"{flag}={value}", "--out", "/proc/none.json"])  # type: ignore[attr-defined]
    assert ended.value.code == 2 and flag in capsys.readouterr().err


def asked(benchmark: object, *words: str) -> str:
    """What it says instead of asking a server, of which there is none here."""
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--model", "m", *words])  # type: ignore[attr-defined]
    return str(ended.value.code)


@pytest.mark.parametrize("benchmark", [long_doc_qa, aiperf_ttft])
def test_a_result_that_could_not_be_written_is_not_measured(benchmark: object, tmp_path: Path) -> None:
    def said(out: Path, *more: str) -> str:
        return asked(benchmark, "--out", str(out), *more)

    (tmp_path / "other.json").write_text('{"question": "another one", "settings": {}}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "half.json").write_text('{"question"')
    assert "other settings" in said(tmp_path / "other.json")
    assert "holds no result" in said(tmp_path / "list.json") and "holds no result" in said(tmp_path / "half.json")
    assert "cannot be written" in said(Path("/proc/none.json"))
    assert "holds no result" in said(tmp_path)
    assert "--system 'a/b'" in said(tmp_path / "new.json", "--system", "a/b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half.json", "list.json", "other.json"], "none is left"


def test_texts_that_are_not_there(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "r.json")]
    assert "No such file" in asked(long_doc_qa, *out, "--text", str(tmp_path / "none"))


@pytest.mark.parametrize("benchmark", [long_doc_qa, aiperf_ttft])
def test_a_server_is_named_in_the_same_way(benchmark: object) -> None:
    parser = benchmark.parser()  # type: ignore[attr-defined]
    assert "http://x" in vars(parser.parse_args(["--base-url", "http://x"])).values()


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:1", "127.0.0.1:1", "http://"])
def test_an_address_of_no_server(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "COUNTED_S", 0.0)
    out = ["--out", str(tmp_path / "r.json"), "--base-url", url, "--num-documents", "1", "--document-length", "2"]
    with pytest.raises(SystemExit, match="names no model"):
        long_doc_qa.main(out)
    assert long_doc_qa.main([*out, "--model", "m"]) == 1, "each request failed"


@pytest.mark.parametrize("event", ["[]", '{"choices": [{"delta": null}]}', '{"choices": 3}', "{"])
def test_an_answer_of_another_form_is_one_that_failed(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=f"data: {event}\n\ndata: [DONE]\n\n")

    monkeypatch.setattr(client.httpx, "AsyncClient", partial(httpx.AsyncClient, transport=httpx.MockTransport(answer)))
    (found,), _ = asyncio.run(client.ask_all(client.Endpoint("http://x", "m"), ["hi"], 1))
    assert found.error


@pytest.mark.parametrize(
    ("own", "flags", "why"),
    [
        ([], ["--num-documents", "x"], "invalid"),
        (["--native", "[1]"], [], "--native: this must be a JSON object"),
        (["--vllm", "'"], [], "--vllm: invalid"),
    ],
)
def test_wrong_flags_start_no_server_and_remove_no_result(
    own: list[str], flags: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    out.write_text("of yesterday")
    places = ["--model", "m", "--program", "no-such-program", "--work", str(tmp_path), "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        serving.main(["long_doc_qa", *places, *own, "--", *flags])
    assert ended.value.code == 2 and why in capsys.readouterr().err
    assert out.read_text() == "of yesterday"


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    status, printed = Wrapper(tmp_path).run("long_doc_qa", ["--program", "no-such-program"])
    assert status == 1 and printed.endswith("no-such-program: No such file or directory\n")
    status, printed = Wrapper(tmp_path).run("long_doc_qa", ["--work", "/proc/none"])
    assert status == 1 and "cannot be written" in printed and "Traceback" not in printed


def test_all_systems_have_the_same_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM on a CPU reserves a core more where any kv_transfer_config is set."""
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU", raising=False)
    assert environment()["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "1"
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "3")
    assert environment()["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "3"
