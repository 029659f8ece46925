"""Redis keys of the index, their values, and the scripts that change them.

`P` is the configured prefix. The text in braces decides the slot in a cluster.

    P:e:<chunk key, 16 bytes>         string   kvtier.index.entry (one server)
    P:{<tag>}:<chunk key>             string   the same, in a cluster; tag: the chunk key's first 10 bits, 3 hex digits
    P:e, P:{<tag>}                    hash     c: entries with this tag; r: records in them; made: see below
    P:{<set id, 16 hex digits>}       hash     the set's list: (rank u16, slot u32, big-endian) -> chunk key
                                               "" -> o: its owner may add; n: unowned; g: it is being removed
    P:{P}:sets                        hash     set id, u64 big-endian -> 0 or, while it is being removed, 1;
                                               then a segment set as in kvtier.index.values
    P:{P}:bytes                       string   sum of n_bytes over the above
    P:{P}:leases                      hash     name -> a lease as in kvtier.index.values
    P:{P}:notes                       hash     name -> a note as in kvtier.index.values
    P:{P}:meta                        hash     format: version of this table; root: id of the root that it indexes;
                                               made: see below

made: "done" once the index was rebuilt from the root; before that, a mark of the process that first found it missing.
Every shard has the field, so that the loss of one shard's memory is detected.

No script uses two slots. A record is published in three steps, each atomic: it is added to its set's list, if the list
accepts records; it is added to its chunk's entry by compare-and-swap; and the list's state is read again, and if it
accepts no more records, both are undone. A set is removed in the opposite order: it is marked in P:{P}:sets, its list
is closed, its records are removed from their entries, then the list and at last the set. So an engine that dies between
two steps leaves a set that is still registered, and that the next evictor removes. Only a publisher that dies beside
an evictor can leave an entry that points to no set; a load of it is a miss, and removes it.

A server at its maxmemory refuses new sets and records. Changes, removals, leases and notes, which are few and small,
pass: without them eviction would be impossible, and the server would stay full.
"""

from __future__ import annotations

import struct
from hashlib import sha1
from typing import NamedTuple

from kvtier.index.redis.wire import Command

FORMAT = b"1"
MADE = b"made"
TAGS = 1024  # tags in a cluster; with 8 shards, the shares of the shards vary by 9 % (root of the number of tags)
DONE = b"done"

LIST_STATE = b""
OPEN, UNOWNED_LIST, CLOSED = b"o", b"n", b"g"
REGISTERED, REMOVING = b"\0", b"\1"

SET_ID = struct.Struct(">Q")
PLACE = struct.Struct(">HI")
TOKEN = struct.Struct("<Q")


class Script(NamedTuple):
    """Lua script. `text` is sent when the server does not know its hash yet."""

    text: str
    sha: str

    @classmethod
    def of(cls, text: str) -> Script:
        return cls(text, sha1(text.encode()).hexdigest())

    @classmethod
    def when_full(cls, text: str) -> Script:
        """Return a script that a full server runs, too. Redis before 7 rejects its first line."""
        return cls.of(f"#!lua flags=allow-oom\n{text}")

    def call(self, keys: list[bytes], arguments: list[bytes]) -> Command:
        return ("EVALSHA", self.sha, len(keys), *keys, *arguments)


_CHANGE_ENTRIES = """
local answer = {}
for i = 2, #KEYS do
  local old, new, records = ARGV[3 * i - 5], ARGV[3 * i - 4], tonumber(ARGV[3 * i - 3])
  local now = redis.call('GET', KEYS[i]) or ''
  answer[i - 1] = now
  if now == old then
    answer[i - 1] = false
    if new == '' then redis.call('DEL', KEYS[i]) else redis.call('SET', KEYS[i], new) end
    if old == '' then redis.call('HINCRBY', KEYS[1], 'c', 1) end
    if new == '' then redis.call('HINCRBY', KEYS[1], 'c', -1) end
    if records ~= 0 then redis.call('HINCRBY', KEYS[1], 'r', records) end
  end
end
return answer
"""
# KEYS: the tag's counts, entries. ARGV for each entry: expected value ("": absent), new value, records added.
# Returns for each entry nil when it was changed, else its value.
ADD_ENTRIES, REMOVE_ENTRIES = Script.of(_CHANGE_ENTRIES), Script.when_full(_CHANGE_ENTRIES)

# KEYS: a tag's counts. ARGV: entries, records added.
ADD_TO_COUNTS = Script.when_full("""
redis.call('HINCRBY', KEYS[1], 'c', ARGV[1])
return redis.call('HINCRBY', KEYS[1], 'r', ARGV[2])
""")

# KEYS: a set's list. ARGV: 1 when read from files, else 0; place, chunk key, ... Returns nil when the list accepts no
# records, else for each place 2: added, 1: it was there, 0: another chunk has it.
ADD_MEMBERS = Script.of("""
local state = redis.call('HGET', KEYS[1], '')
if not state or state == 'g' or (state == 'n' and ARGV[1] == '0') then return false end
local answer = {}
for i = 2, #ARGV, 2 do
  local key = redis.call('HGET', KEYS[1], ARGV[i])
  local n = #answer + 1
  if not key then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]); answer[n] = 2
  elseif key == ARGV[i + 1] then answer[n] = 1
  else answer[n] = 0 end
end
return answer
""")

# KEYS: a set's list. ARGV: its new state; a closed list stays closed. Returns the list's content when this closes it.
MARK_LIST = Script.when_full("""
local is_closing = ARGV[1] == 'g'
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
if is_closing or redis.call('HGET', KEYS[1], '') ~= 'g' then redis.call('HSET', KEYS[1], '', ARGV[1]) end
return is_closing and redis.call('HGETALL', KEYS[1]) or {}
""")

# KEYS: a set's list. ARGV: its state; place, chunk key, ... Makes the list with these records if it is missing: without
# them, a reader that fails before it publishes them would leave a list that seems to have none.
RESTORE_LIST = Script.of("""
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], '', ARGV[1])
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 0
""")

# KEYS: a hash with the field `made`. ARGV: expected value, new value.
MARK_MADE = Script.of("""
if redis.call('HGET', KEYS[1], 'made') == ARGV[1] then redis.call('HSET', KEYS[1], 'made', ARGV[2]) end
return 0
""")

# KEYS: the sets, the sum of their bytes. Returns the sum, and the values of all sets.
SUM_AND_SETS = Script.of("return {redis.call('GET', KEYS[2]), redis.call('HVALS', KEYS[1])}")

# KEYS: the sum of bytes. ARGV: bytes added.
ADD_TO_SUM = Script.when_full("return redis.call('INCRBY', KEYS[1], ARGV[1])")

# KEYS: the notes. ARGV: name, note.
PUT_NOTE = Script.when_full("return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])")

_CHANGE_TABLE = """
if ARGV[1] ~= '' then
  local lease = redis.call('HGET', KEYS[3], ARGV[1]) or '\\0\\0\\0\\0\\0\\0\\0\\0'
  if string.sub(lease, 1, 8) ~= ARGV[2] then return false end
end
local answer = {}
for i = 3, #ARGV, 4 do
  local now = redis.call('HGET', KEYS[1], ARGV[i]) or ''
  local n = #answer + 1
  answer[n] = now
  if now == ARGV[i + 1] then
    answer[n] = false
    if ARGV[i + 2] == '' then redis.call('HDEL', KEYS[1], ARGV[i])
    else redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2]) end
    if ARGV[i + 3] ~= '0' then redis.call('INCRBY', KEYS[2], ARGV[i + 3]) end
  end
end
return answer
"""
# KEYS: a hash, the sum of bytes, the leases. ARGV: a lease ("": none) and its expected token; for each field of the
# hash its name, expected value, new value, bytes added. Returns nil when the token differs, else for each field nil
# when it was changed, or its value.
ADD_TO_TABLE, CHANGE_TABLE = Script.of(_CHANGE_TABLE), Script.when_full(_CHANGE_TABLE)

_OF_ENTRIES = (ADD_ENTRIES, REMOVE_ENTRIES, ADD_TO_COUNTS, ADD_MEMBERS, MARK_LIST, RESTORE_LIST)
_OF_TABLES = (MARK_MADE, SUM_AND_SETS, ADD_TO_SUM, PUT_NOTE, ADD_TO_TABLE, CHANGE_TABLE)
SCRIPTS = {script.sha: script.text for script in _OF_ENTRIES + _OF_TABLES}


class Keys:
    """Names of the index's keys. tags: 1 on one server, TAGS in a cluster."""

    def __init__(self, prefix: str, tags: int) -> None:
        self._prefix = prefix.encode()
        self.tags = tags
        shared = b"%s:{%s}:" % (self._prefix, self._prefix)
        self.sets, self.bytes, self.leases = shared + b"sets", shared + b"bytes", shared + b"leases"
        self.notes, self.meta = shared + b"notes", shared + b"meta"

    def entry(self, key: bytes) -> bytes:
        return self.counts(self.tag(key)) + b":" + key

    def tag(self, key: bytes) -> int:
        return 0 if self.tags == 1 else (key[0] << 2) | key[1] >> 6

    def counts(self, tag: int) -> bytes:
        return self._prefix + b":e" if self.tags == 1 else b"%s:{%03x}" % (self._prefix, tag)

    def list_of(self, set_id: int) -> bytes:
        return b"%s:{%016x}" % (self._prefix, set_id)

    @property
    def entry_pattern(self) -> bytes:
        """Return the pattern for a SCAN of strings; a chunk key has 16 arbitrary bytes."""
        # Hashes of an index with the prefix `P:e:<more>` match it, too (its leases, its sets), but no strings.
        return self._prefix + (b":e:" if self.tags == 1 else b":{???}:") + b"?" * 16

    @property
    def list_pattern(self) -> bytes:
        return b"%s:{%s}" % (self._prefix, b"?" * 16)
