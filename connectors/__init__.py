"""Connectors: what ties the library to an engine. `bridge` knows no engine; each other module knows exactly one."""
