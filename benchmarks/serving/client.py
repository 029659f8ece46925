"""Asks an OpenAI-compatible endpoint, streaming, and times the first token of each answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

CONNECT_TIMEOUT_S = 30.0
ERROR_CHARACTERS = 300
UNANSWERED = (httpx.HTTPError, httpx.InvalidURL)
UNEXPECTED = (ValueError, LookupError, TypeError, AttributeError)
"""What reading an answer of another form raises."""


@dataclass(frozen=True)
class Endpoint:
    """Where and how to ask. url: without /v1. is_chat: chat completions, else completions. extra: of each request's
    body. timeout_s: between two pieces of an answer, so also until its first token."""

    url: str
    model: str
    is_chat: bool = True
    output_tokens: int = 100
    extra: dict[str, Any] = field(default_factory=dict)
    api_key: str = "none"
    timeout_s: float = 3600.0

    def request(self, prompt: str) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        body = {
            "model": self.model,
            "max_tokens": self.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        if self.is_chat:
            return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}
        return "/v1/completions", body | {"prompt": prompt}


@dataclass(frozen=True)
class Prompt:
    """prompt_id: of its document. is_miss: it was changed so that no cache can have it."""

    prompt_id: int
    text: str
    is_miss: bool = False


@dataclass(frozen=True)
class Answer:
    """Times in seconds from the round's start; ttft from the request's. cached_tokens: None where the server is silent.

    ttft is to the first text; where there was none at all (tokens that are parts of a character), to the first piece
    of the stream that belongs to the answer.
    """

    prompt_id: int
    request_start: float
    ttft: float
    request_end: float
    successful: bool
    is_miss: bool
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    text: str = ""
    error: str = ""

    @property
    def ttft_time(self) -> float:
        return self.request_start + self.ttft


async def find_model(url: str) -> str:
    """The first model that the endpoint lists. Raises SystemExit where none can be had."""
    async with httpx.AsyncClient(timeout=CONNECT_TIMEOUT_S) as client:
        try:
            answer = await client.get(f"{url}/v1/models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (*UNANSWERED, *UNEXPECTED) as error:
            raise SystemExit(f"{url}/v1/models names no model ({error}); is the server up? Else give --model") from None


async def ask_all(
    endpoint: Endpoint, prompts: Sequence[Prompt], inflight: int, done: Callable[[int], None] = lambda count: None
) -> tuple[list[Answer], float]:
    """Asks all, at most `inflight` at once, in this order. Answers in the same order, and the seconds of the whole.

    done: told how many have been answered, after each.
    """
    free, answered = asyncio.Semaphore(inflight), 0
    limits = httpx.Limits(max_connections=inflight, max_keepalive_connections=inflight)
    timeout = httpx.Timeout(endpoint.timeout_s, connect=CONNECT_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers) as client:
        start_s = time.perf_counter()

        async def one(prompt: Prompt) -> Answer:
            nonlocal answered
            async with free:  # so the time to the first token does not count waiting for one's turn
                answer = await _ask(client, endpoint, prompt, start_s)
            answered += 1
            done(answered)
            return answer

        answers = list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
        return answers, time.perf_counter() - start_s


async def _ask(client: httpx.AsyncClient, endpoint: Endpoint, prompt: Prompt, round_s: float) -> Answer:
    path, body = endpoint.request(prompt.text)
    start_s = time.perf_counter()
    piece_s = text_s = 0.0
    texts: list[str] = []
    usage: dict[str, Any] = {}
    error = ""
    try:
        async for event in _events(client, endpoint.url + path, body):
            if event.get("error"):
                error = json.dumps(event["error"])[:ERROR_CHARACTERS]
            usage = event.get("usage") or usage
            if (text := _text(event)) is None:
                continue
            piece_s = piece_s or time.perf_counter()
            text_s = text_s or (time.perf_counter() if text else 0.0)
            texts.append(text)
    except (*UNANSWERED, *UNEXPECTED) as fault:
        error = f"{type(fault).__name__}: {fault}"[:ERROR_CHARACTERS]
    first_s = text_s or piece_s
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        prompt.prompt_id,
        start_s - round_s,
        first_s - start_s if first_s else 0.0,
        time.perf_counter() - round_s,
        successful=bool(first_s) and not error,
        is_miss=prompt.is_miss,
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=details.get("cached_tokens"),
        text="".join(texts),
        error=error or ("" if first_s else "the answer was empty"),
    )


async def _events(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events of one answer. Raises httpx.HTTPError and ValueError."""
    async with client.stream("POST", url, json=body) as stream:
        if stream.is_error:
            said = (await stream.aread()).decode(errors="replace")
            raise ValueError(f"HTTP {stream.status_code}: {said[:ERROR_CHARACTERS]}")
        async for line in stream.aiter_lines():
            data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
            if data and data != "[DONE]":
                yield json.loads(data)


def _text(event: dict[str, Any]) -> str | None:
    """What a piece of the stream adds to the answer; None where it is none (usage, or the line that names the role)."""
    choices = event.get("choices")
    if not choices:
        return None
    if "delta" not in choices[0]:
        return str(choices[0].get("text") or "")
    delta = choices[0]["delta"]
    said = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
    return None if not said and "role" in delta else str(said)
