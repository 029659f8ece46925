"""These need vLLM, 0.32 or later."""

import pytest

pytest.importorskip("vllm")
