"""Bodies that are nearly right, for every route that takes one: an answer of the routes, a problem, never a 500."""

from __future__ import annotations

import json
import random

from pytest import Subtests

from tests.fuzz import inputs
from tests.server.calls import CALLS
from tests.server.serving import Serving

SEED = 20261124
BODIES = 60
"""For each route."""


def test_bodies_that_are_nearly_right(served: Serving, subtests: Subtests) -> None:
    rng, statuses = random.Random(SEED), set()
    for call in CALLS:
        path, body = call.made(served)
        if body is None:
            continue
        with subtests.test(call=str(call)):
            for _ in range(BODIES):
                content = inputs.changed(rng, [json.dumps(body).encode()], inputs.JSON)
                answer = served.call(call.method, path, content=content, headers={"Content-Type": "application/json"})
                assert answer.status_code < 500, (content[:500], answer.text[:500])
                assert len(answer.content) < 10 * len(content) + 20_000, "an answer out of proportion"
                if answer.status_code >= 400:
                    assert answer.json()["status"] == answer.status_code
                statuses.add(answer.status_code)
    assert statuses >= {200, 422}, "all were refused, or none; the test proves nothing"
