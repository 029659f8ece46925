"""These need vLLM, 0.32 or later."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")
