"""The operations of administration on a root and its index, for `kvtier` and `kvtier serve`: no web framework in here,
and no printing."""
