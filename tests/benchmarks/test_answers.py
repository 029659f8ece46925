"""benchmarks.answers: answers are compared token by token, and a prompt without a hit is an error."""

from typing import Any

import pytest

from benchmarks.answers import ANSWER_TOKENS, compared


def row(tokens: list[int], hit_tokens: int = 512) -> dict[str, Any]:
    return {"answer": tokens, "hit_tokens": hit_tokens}


def test_tokens_until_the_first_difference() -> None:
    own = list(range(ANSWER_TOKENS))
    other = [*own[:5], 99, *own[6:]]
    found = compared([row(own)] * 3, [row(own), row(other), row(own)])
    assert found["equal"] == 2 and found["answers"] == 3
    assert found["tokens_until_difference"] == [ANSWER_TOKENS, 5, ANSWER_TOKENS]
    assert found["median_tokens"] == ANSWER_TOKENS


def test_prompt_without_a_hit_is_an_error() -> None:
    own = row(list(range(ANSWER_TOKENS)))
    with pytest.raises(SystemExit, match="without a hit"):
        compared([own, own], [own, row(own["answer"], 0)])
