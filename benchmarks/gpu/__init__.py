"""Measurements on a GPU host, one question a module; `run_h200.sh STAGE` runs them there."""
