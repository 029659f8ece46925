"""Benchmarks start event loops of their own in this process."""

import asyncio
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_loop_of_others() -> Iterator[None]:
    """Tests in a browser leave the loop of Playwright's synchronous interface running in theirs."""
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    yield
    asyncio._set_running_loop(running)
