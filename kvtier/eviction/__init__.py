"""Which segment sets go when space is needed. Pure: sets, limits and the clock in, sets to remove out.

base says what a policy is; lru and s3fifo are two. pins: which sets are protected. choice: how many of which go, for
room, for limits, and as an administrator asks.
"""
