"""Comparison of kvtier, its peers, KvikIO alone and the machine's ceilings."""
