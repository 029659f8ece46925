"""Engines of this folder's tests end with their test."""

from tests.support.ends import engines_end as engines_end  # a fixture
