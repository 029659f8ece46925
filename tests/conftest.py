"""For all tests: no deadlines of hypothesis and one thread of torch, because they share their processors."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("kvtier", deadline=None)
settings.load_profile("kvtier")

# Set before torch is imported. Two threads each in two workers mostly wait for each other, their tensors being small.
os.environ.setdefault("OMP_NUM_THREADS", "1")
