"""No simulated fault is logged."""

from tests.support.ends import quiet as quiet  # a fixture
