"""Stands in for vLLM's server where only starting, asking and stopping are tested: answers at once, from no model.

Takes the arguments of vLLM's server. Its process number, its arguments, and that it was asked to stop are JSON lines
in the file that FAKE_ENGINE_LOG names. Prompts that it has seen are hits: of its own cache, or of the connector where
it has one. FAKE_ENGINE is how it behaves: it "fails" to start, is "slow" to answer, or "deaf" to being asked to stop.
"""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = ["a", " first", " answer"]
SEEN: set[str] = set()
COUNTS = {"prompt_tokens": 0, "prefix_cache_queries": 0, "prefix_cache_hits": 0, "external_prefix_cache_hits": 0}


MANNER = os.environ.get("FAKE_ENGINE", "")
SLOW_S = 300.0


def note(what: object) -> None:
    with open(os.environ["FAKE_ENGINE_LOG"], "a") as file:
        file.write(json.dumps(what) + "\n")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        pages = {
            "/health": "",
            "/v1/models": json.dumps({"data": [{"id": sys.argv[sys.argv.index("--model") + 1]}]}),
            "/metrics": metrics(),
        }
        self.send_response(200 if self.path in pages else 404)
        self.end_headers()
        self.wfile.write(pages.get(self.path, "").encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body.get("prompt") or body["messages"][0]["content"]
        if MANNER == "slow":
            note("asked")
            time.sleep(SLOW_S)
        if "refused" in prompt:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": "too long"}')
            return
        cached = count(prompt)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        is_chat = "messages" in body
        for event in events(is_chat, len(prompt.split()), cached):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def count(prompt: str) -> int:
    """Tokens (words) of it that are hits."""
    n_words = len(prompt.split())
    cached = n_words if prompt in SEEN else 0
    SEEN.add(prompt)
    COUNTS["prompt_tokens"] += n_words
    COUNTS["prefix_cache_queries"] += n_words
    where = "external_prefix_cache_hits" if "--kv-transfer-config" in sys.argv else "prefix_cache_hits"
    COUNTS[where] += cached
    return cached


def events(is_chat: bool, n_words: int, cached: int) -> list[dict[str, Any]]:
    if is_chat:
        said = [{"delta": {"role": "assistant", "content": ""}}, *({"delta": {"content": word}} for word in WORDS)]
    else:
        said = [{"text": word} for word in WORDS]
    usage = {"prompt_tokens": n_words, "prompt_tokens_details": {"cached_tokens": cached}}
    return [*({"choices": [choice]} for choice in said), {"choices": [], "usage": usage}]


def metrics() -> str:
    lines = [f'vllm:{name}_total{{engine="0",model_name="x"}} {float(value)}' for name, value in COUNTS.items()]
    config = 'vllm:cache_config_info{_block_size_resolved="True",block_size="16",num_gpu_blocks="10"} 1.0'
    return "\n".join([*lines, config, ""])


def interrupted(number: int, frame: object) -> None:
    note("interrupted")
    if MANNER != "deaf":
        os._exit(0)


def main() -> None:
    if MANNER == "fails":
        sys.exit("kvtier: root: is not to be had")
    signal.signal(signal.SIGINT, interrupted)
    note({"pid": os.getpid(), "arguments": sys.argv[1:]})
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
