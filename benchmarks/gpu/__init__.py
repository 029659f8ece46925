"""Measurements on a GPU host, one question a file; `run_h200.sh STAGE` runs them there."""
