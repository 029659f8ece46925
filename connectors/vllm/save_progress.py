"""How much of a request may be saved by now: KV that is final and, with an adapter, surely of the weights of its key.

An adapter's files may change while a request waits, and vLLM reads them when the request is scheduled, or replaces them
in place between two of its steps. So what was computed with an adapter is saved once the steps that did are over, and
only if the files are still those that the key was made from.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from kvtier.connectors.vllm.lora import Adapters, Signature


def step_frontier(request: Any, computed_tokens: int, scheduled_tokens: int, save_generated: bool) -> int:
    """Tokens whose KV is final after a step: scheduled ones count, placeholders and unverified drafts do not."""
    known: int = request.num_tokens if save_generated else request.num_prompt_tokens
    return min(computed_tokens + scheduled_tokens, known)


def final_frontier(request: Any, save_generated: bool) -> int:
    """Tokens whose KV is final when a request ends: all but the last one, which nothing was computed from.

    An aborted or preempted request has only what was computed; num_computed_tokens may run ahead of the known
    tokens by drafts and placeholders, which the other bound takes off.
    """
    tokens = request.num_tokens if save_generated else request.num_prompt_tokens
    final: int = min(request.num_computed_tokens, max(request.num_prompt_tokens, tokens - 1))
    return final


class StepsBehind(NamedTuple):
    """How many steps a frontier has to wait. drafts: a draft model's own KV of a token may be written one step after
    the target's. adapters: until vLLM, which plans steps ahead, has surely carried one out."""

    drafts: int
    adapters: int

    @classmethod
    def of(cls, vllm_config: Any, has_draft: bool) -> StepsBehind:
        # vLLM has at most so many in flight: one a pipeline stage, and one more when it schedules asynchronously.
        return cls(int(has_draft), vllm_config.parallel_config.pipeline_parallel_size + 1)


class _Adapted:
    """A request with an adapter, since it was given its blocks. since: its files when it was first seen; None: it is
    passed by. n_outputs: tokens that it had answered by then."""

    def __init__(self, since: Signature | None, n_outputs: int) -> None:
        self.since = since
        self.n_outputs = n_outputs
        self.planned: deque[tuple[int, int]] = deque()  # (step, frontier)
        self.carried_out = 0


class Frontiers:
    def __init__(self, save_generated: bool, behind: StepsBehind, adapters: Adapters) -> None:
        self._save_generated = save_generated
        self._behind = behind
        self._adapters = adapters
        self._adapted: dict[str, _Adapted] = {}

    def track(self, request: Any) -> None:
        """After the request's key was made."""
        if request.lora_request is not None:
            self._adapted[request.request_id] = _Adapted(self._adapters.read_at(request.lora_request), 0)

    def is_of_its_key(self, request: Any) -> bool:
        """Whether vLLM can have read no other weights for it than those of its key."""
        adapted = self._adapted.get(request.request_id)
        return adapted is None or self._adapters.are_still(request.lora_request, adapted.since)

    def anew(self, request: Any) -> None:
        """The request was given other blocks, with nothing in them."""
        adapted = self._adapted.get(request.request_id)
        if adapted is not None:
            self._adapted[request.request_id] = _Adapted(adapted.since, request.num_output_tokens)

    def of_step(self, request: Any, computed_tokens: int, scheduled_tokens: int, step: int) -> int:
        """Tokens that may be saved after this step, which is planned now, if the request is of its key then."""
        counted = 0 if self._behind.drafts else scheduled_tokens
        frontier = step_frontier(request, computed_tokens, counted, self._save_generated)
        adapted = self._adapted.get(request.request_id)
        if adapted is None:
            return frontier
        adapted.planned.append((step, frontier))
        while adapted.planned[0][0] + self._behind.adapters <= step:
            adapted.carried_out = adapted.planned.popleft()[1]
        return adapted.carried_out

    def of_end(self, request: Any, reached_tokens: int) -> int:
        """The same when a request has ended, whose steps have reached so far."""
        frontier = min(final_frontier(request, self._save_generated), reached_tokens)
        is_of_its_key = self.is_of_its_key(request)
        adapted = self._adapted.pop(request.request_id, None)
        if adapted is None:
            return frontier
        if request.num_output_tokens == adapted.n_outputs:  # its latest steps may not have been carried out
            frontier = min(frontier, adapted.carried_out)
        return frontier if is_of_its_key else 0
