"""Choice of the segment sets to remove when space is needed. Pure: sets, limits and the clock in, sets to remove out.

lru: order of eviction. pins: sets that pins protect. choice: how many of which sets go, for room, for limits, and as
an administrator asks.
"""
