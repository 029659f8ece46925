"""What goes wrong in a run: named recipes, and `random`, which draws its own. A recipe is weather, and how often what
is done to the place; whatever it does not name is calm."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tests.simulation.disk import Weather
from tests.simulation.index import IndexWeather

IndexKind = Literal["memory", "remote", "lmdb"]

USUAL: Mapping[str, float] = {
    "arrive": 30,
    "step": 50,
    "nap": 8,
    "long_nap": 0.3,
    "open": 0.5,
    "kill": 0.15,
    "leave": 0.15,
    "sweep": 0.3,
    "rebuild": 0.1,
    "evict": 0.15,
    "reset": 0.05,
    "pin": 0.1,
}
"""How often each thing is done, in any run; see the methods of these names in tests.simulation.world."""


@dataclass(frozen=True)
class Recipe:
    """acts: how often, beside or instead of the usual. sets: for how many segment sets there is room. is_shared: each
    process sees the disk through a client of its own (tests.simulation.disk)."""

    name: str
    acts: Mapping[str, float] = field(default_factory=dict)
    disk: Weather = field(default_factory=Weather)
    index: IndexWeather = field(default_factory=IndexWeather)
    kinds: tuple[IndexKind, ...] = ("memory", "memory", "remote", "lmdb")
    sets: int = 10
    engines: int = 3
    is_shared: bool = False

    def weights(self) -> dict[str, float]:
        return {**USUAL, **self.acts}


NAMED = {
    recipe.name: recipe
    for recipe in (
        Recipe("calm", {"kill": 0, "leave": 0, "reset": 0, "evict": 0}, sets=60),
        Recipe("restart_in_mid_save", {"kill": 3, "open": 4}, Weather(slow=0.9, slow_s=0.2)),
        Recipe("index_amnesia", {"forget": 1.5}, index=IndexWeather(slow_s=0.05), sets=16),
        Recipe("full_disk", {"fill_disk": 2}, sets=8),
        Recipe("stale_location", {"evict": 1.5}, index=IndexWeather(stale=0.3), sets=8),
        Recipe("slow_disk", {}, Weather(slow=0.95, slow_s=0.8)),
        Recipe("hung_reads", {}, Weather(hang=0.04, slow=0.7)),
        Recipe("hung_calls", {}, Weather(hang_calls=0.05, slow=0.7)),
        Recipe("repeated_publishes", {"evict": 0.5}, index=IndexWeather(slow=0.4, slow_s=0.3, repeated=0.5)),
        Recipe(
            "two_evictors",
            {"evict": 3, "keep_limits": 2},
            index=IndexWeather(slow=0.05, slow_s=12.0),
            sets=7,
            kinds=("memory", "remote"),
            engines=4,
        ),
        Recipe(
            "killed_evictors",
            {"evict": 3, "sweep": 1, "kill_admin": 3, "kill": 0.5, "open": 1},
            sets=7,
            index=IndexWeather(slow=0.5, slow_s=0.1),
        ),
        Recipe("clock_jump", {"jump_clock": 2}),
        Recipe("damage", {"vandalize": 3, "flip_in_memory": 3}, Weather(torn=0.02, short=0.01, error=0.02)),
        Recipe("power_loss", {"lose_power": 0.5}, Weather(slow=0.8, slow_s=0.05)),
        Recipe("lost_answers", {}, index=IndexWeather(lost=0.1, slow=0.4, slow_s=0.5), kinds=("remote", "memory")),
        Recipe("slow_writers", {"sweep": 2}, Weather(hang=0.03, hang_s=9.0), IndexWeather(slow=0.1, slow_s=4.0)),
        Recipe(
            "lapsed_writers",
            {"jump_clock": 1.5, "sweep": 8},
            Weather(hang=0.03, hang_s=9.0),
            IndexWeather(slow=0.25, slow_s=3.0),
        ),
        Recipe("new_weights", {"reset": 1.5}),
        Recipe(
            "shared_disk",
            {"kill": 0.5, "sweep": 1.0, "rebuild": 0.5},
            Weather(slow=0.8, slow_s=0.1, away=0.003),
            is_shared=True,
        ),
        Recipe("tenants", {"set_quota": 0.5, "pin": 0.5}, sets=12),
    )
}


def drawn(rng: random.Random) -> Recipe:
    """Any of the above together, each a little or not at all."""

    def some(most: float, chance: float = 0.3) -> float:
        return rng.random() * most if rng.random() < chance else 0.0

    acts = {
        name: some(most)
        for name, most in (
            ("kill", 2.0),
            ("forget", 0.8),
            ("fill_disk", 1.0),
            ("evict", 2.0),
            ("keep_limits", 1.0),
            ("jump_clock", 1.0),
            ("vandalize", 1.5),
            ("flip_in_memory", 2.0),
            ("lose_power", 0.3),
            ("reset", 0.5),
            ("set_quota", 0.3),
            ("sweep", 2.0),
            ("rebuild", 0.5),
            ("kill_admin", 1.0),
        )
    }
    disk = Weather(
        slow=rng.random(),
        slow_s=rng.choice([0.002, 0.02, 0.3]),
        hang=some(0.04),
        hang_s=rng.choice([1.5, 3.0, 9.0]),
        hang_calls=some(0.02),
        error=some(0.05),
        short=some(0.02),
        torn=some(0.02),
        away=some(0.005),
    )
    index = IndexWeather(
        slow=some(0.5, 0.6),
        slow_s=rng.choice([0.001, 0.05, 2.0, 7.0]),
        lost=some(0.1),
        stale=some(0.3),
        repeated=some(0.4),
    )
    return Recipe(
        "random",
        {**acts, "open": 0.5 + acts["kill"]},
        disk,
        index,
        sets=rng.choice([6, 10, 30]),
        engines=rng.choice([1, 2, 3, 4]),
        is_shared=rng.random() < 0.4,
    )


def recipe_for(name: str, seed: int) -> Recipe:
    """By its name; `mixed`: of the seeds, every third is random, and the others are the named ones in turn."""
    if name == "mixed":
        name = "random" if seed % 3 == 0 else list(NAMED)[(seed - seed // 3) % len(NAMED)]
    return drawn(random.Random(seed)) if name == "random" else NAMED[name]
