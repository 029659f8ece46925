"""SlotTable against a model: any order of reserving, committing, leasing, releasing, dropping and evicting."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from kvtier.arena.arena import SlotTable

N_SLOTS, N_SLOTS_MAX = 4, 8
KEYS = [bytes([number]) for number in range(7)]


class SlotsMachine(RuleBasedStateMachine):
    reserved = Bundle("reserved")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.n_slots = N_SLOTS
        self.table: SlotTable[str] = SlotTable(N_SLOTS)
        self.cached: dict[bytes, tuple[int, str]] = {}  # may hold keys that were evicted since; never wrong slots
        self.in_use: dict[int, int] = {}  # slot -> leases
        self.filling: set[int] = set()
        self.serial = 0

    @rule(target=reserved)
    def reserve(self) -> object:
        slot = self.table.reserve()
        if slot is None:
            assert len(self.filling) + len(self.in_use) == self.n_slots, "refused although a slot was free"
            return multiple()
        assert slot not in self.filling, "a slot was given out twice"
        assert slot not in self.in_use, "a leased slot was given out (I3)"
        self.filling.add(slot)
        self.cached = {key: place for key, place in self.cached.items() if place[0] != slot}
        return slot

    @precondition(lambda self: self.n_slots < N_SLOTS_MAX)
    @rule(more=st.integers(0, 2))
    def grow(self, more: int) -> None:
        self.n_slots += more
        self.table.grow(self.n_slots)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=5, unique=True), target=reserved)
    def claim(self, keys: list[bytes]) -> object:
        was_full = len(self.filling) + len(self.in_use) == self.n_slots
        claimed = self.table.claim(keys)
        if len(claimed) < len(keys):
            in_use = self.filling | self.in_use.keys() | {slot for slot, _ in claimed}
            assert len(in_use) == self.n_slots, "refused although a slot was free"
        assert not was_full or all(content is not None for _, content in claimed)
        slots = []
        for key, (slot, content) in zip(keys, claimed, strict=False):
            if content is not None:
                assert (slot, content) == self.cached[key], "another chunk's slot was given (I2)"
                self.table.release(slot, key)
                continue
            assert slot not in self.filling and slot not in self.in_use, "a slot was given out twice"
            self.filling.add(slot)
            self.cached = {other: place for other, place in self.cached.items() if place[0] != slot}
            slots.append(slot)
        return multiple(*slots)

    @rule(slot=consumes(reserved), key=st.sampled_from(KEYS))
    def commit(self, slot: int, key: bytes) -> None:
        self.serial += 1
        was_there = key in self.table._cached
        assert self.table.commit([(slot, key, f"content {self.serial}")]) == [not was_there]
        self.filling.remove(slot)
        if not was_there:
            self.cached[key] = (slot, f"content {self.serial}")

    @rule(slot=consumes(reserved))
    def discard(self, slot: int) -> None:
        self.table.discard(slot)
        self.filling.remove(slot)

    @rule(target=leases, key=st.sampled_from(KEYS))
    def lease(self, key: bytes) -> object:
        found = self.table.lease(key)
        assert (found is not None) == (key in self.cached)
        if found is None:
            return multiple()
        assert found == self.cached[key], "another chunk's slot was given (I2)"
        self.in_use[found[0]] = self.in_use.get(found[0], 0) + 1
        return (found[0], key)

    @rule(lease=consumes(leases))
    def release(self, lease: tuple[int, bytes]) -> None:
        slot, key = lease
        self.table.release(slot, key)
        self.in_use[slot] -= 1
        if not self.in_use[slot]:
            del self.in_use[slot]

    @rule(key=st.sampled_from(KEYS))
    def drop(self, key: bytes) -> None:
        self.table.drop(key)
        self.cached.pop(key, None)
        assert key not in self.table._cached

    @invariant()
    def every_slot_is_in_one_state(self) -> None:
        self.table.check()
        assert self.table.available == self.n_slots - len(self.filling) - len(self.in_use)


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
