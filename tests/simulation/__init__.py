"""The library in a world that is drawn from a seed: see `tests.simulation.world`."""
