"""Client of an OpenAI-compatible endpoint: streams answers and times the first token of each."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

CONNECT_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 3600.0  # between two pieces of an answer, so also until its first token
ERROR_CHARACTERS = 300
UNANSWERED = (httpx.HTTPError, httpx.InvalidURL)
UNEXPECTED = (ValueError, LookupError, TypeError, AttributeError)  # raised by reading an answer of another form


@dataclass(frozen=True)
class Endpoint:
    """url: without /v1. ignore_eos: answers have all output tokens (vLLM's option)."""

    url: str
    model: str
    output_tokens: int = 100
    ignore_eos: bool = False

    def body(self, prompt: str) -> dict[str, Any]:
        return {
            "model": self.model,
            "max_tokens": self.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "messages": [{"role": "user", "content": prompt}],
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }


@dataclass(frozen=True)
class TimedAnswer:
    """Times in seconds from the request's start.

    ttft_s is to the first text; where there was none at all (tokens that are parts of a character), to the first piece
    of the stream that belongs to the answer. error: "" for success.
    """

    ttft_s: float
    end_s: float
    error: str


async def find_model(url: str) -> str:
    """Return the first model that the endpoint lists. Raise SystemExit if there is none."""
    async with httpx.AsyncClient(timeout=CONNECT_TIMEOUT_S) as client:
        try:
            answer = await client.get(f"{url}/v1/models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (*UNANSWERED, *UNEXPECTED) as error:
            raise SystemExit(f"{url}/v1/models names no model ({error}); is the server up? Else give --model") from None


async def ask_all(
    endpoint: Endpoint, prompts: Sequence[str], inflight: int, done: Callable[[int], None] = lambda count: None
) -> tuple[list[TimedAnswer], float]:
    """Ask all in this order, at most `inflight` at once. Return the answers and the seconds of the whole.

    done: called with the number of answers so far, after each.
    """
    free, answered = asyncio.Semaphore(inflight), 0
    limits = httpx.Limits(max_connections=inflight, max_keepalive_connections=inflight)
    timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"}
    async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers) as client:
        start_s = time.perf_counter()

        async def one(prompt: str) -> TimedAnswer:
            nonlocal answered
            async with free:  # so the time to the first token does not count the wait for a free place
                answer = await _ask(client, endpoint, prompt)
            answered += 1
            done(answered)
            return answer

        answers = list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
        return answers, time.perf_counter() - start_s


async def _ask(client: httpx.AsyncClient, endpoint: Endpoint, prompt: str) -> TimedAnswer:
    start_s = time.perf_counter()
    piece_s = text_s = 0.0
    error = ""
    try:
        async for event in _events(client, f"{endpoint.url}/v1/chat/completions", endpoint.body(prompt)):
            if event.get("error"):
                error = json.dumps(event["error"])[:ERROR_CHARACTERS]
            if (text := _text(event)) is not None:
                piece_s = piece_s or time.perf_counter()
                text_s = text_s or (time.perf_counter() if text else 0.0)
    except (*UNANSWERED, *UNEXPECTED) as fault:
        error = f"{type(fault).__name__}: {fault}"[:ERROR_CHARACTERS]
    first_s = text_s or piece_s
    error = error or ("" if first_s else "the answer was empty")
    return TimedAnswer(first_s - start_s if first_s else 0.0, time.perf_counter() - start_s, error)


async def _events(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the server-sent events of one answer. Raise httpx.HTTPError and ValueError."""
    async with client.stream("POST", url, json=body) as stream:
        if stream.is_error:
            body_text = (await stream.aread()).decode(errors="replace")
            raise ValueError(f"HTTP {stream.status_code}: {body_text[:ERROR_CHARACTERS]}")
        async for line in stream.aiter_lines():
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if data and data != "[DONE]":
                yield json.loads(data)


def _text(event: dict[str, Any]) -> str | None:
    """Return what an event adds to the answer; None for events that add nothing (usage, or the one with the role)."""
    choices = event.get("choices")
    if not choices:
        return None
    delta = choices[0]["delta"]
    text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    return None if not text and "role" in delta else str(text)
