"""A KV cache tier that outlives the GPU. See README.md in this folder for the map."""

from kvtier._bootstrap import installed_instead, name_log_lines

__path__ = installed_instead(__path__)
name_log_lines()
