"""What stands under which key in Redis, and the scripts that change it.

`P` is the configured prefix. What stands in braces decides the slot in a cluster.

    P:e:<chunk key, 16 bytes>         string   kvtier.index.entry (one server)
    P:{<tag>}:<chunk key>             string   the same, in a cluster; tag: the chunk key's first 10 bits, 3 hex digits
    P:e, P:{<tag>}                    hash     c: entries with this tag; r: records in them; made: see below
    P:{<set id, 16 hex digits>}       hash     the set's list: (rank u16, slot u32, big-endian) -> chunk key
                                               "" -> o: its owner may add; n: nobody's; g: it is being removed
    P:{P}:sets                        hash     set id, u64 big-endian -> 0 or, while it is being removed, 1;
                                               then a segment set as in kvtier.index.values
    P:{P}:bytes                       string   sum of n_bytes over the above
    P:{P}:leases                      hash     name -> fencing token u64, expires f64, owner (little-endian)
    P:{P}:notes                       hash     name -> a note as in kvtier.index.values
    P:{P}:meta                        hash     format: of this table; root: id of the root that it is the index of;
                                               made: see below

made: "done" once somebody has read the root into this index; else the mark of who first found it missing. It stands on
every shard, so that one that lost its memory is noticed.

No script touches two slots. A record is published in three steps, each atomic: it is entered in its set's list, if the
list takes any; it is put into its chunk's entry, if that is still what it was a moment ago; and the list is looked at
again, and if it takes no more, both are taken back. A set is removed in the opposite order: it is marked in P:{P}:sets,
its list is closed, its records leave their entries, the list goes, and last the set. So whoever dies in between leaves
a set that is still listed, and that the next evictor removes; only a publisher that dies right beside an evictor can
leave an entry that points nowhere, which is a miss, and gone with it.

A server at its maxmemory refuses what is new: sets, and records. What changes or goes is let through, with leases and
notes, which are few and small: without them nobody could evict, and it would stay full.
"""

from __future__ import annotations

import struct
from hashlib import sha1
from typing import NamedTuple

from kvtier.index.redis.wire import Command

FORMAT = b"1"
MADE = b"made"
TAGS = 1024
"""Of a cluster: a shard's share of them varies by the root of its number of tags, 9 % with 8 shards."""
DONE = b"done"

LIST_STATE = b""
OPEN, NOBODYS, CLOSED = b"o", b"n", b"g"
HELD, GOING = b"\0", b"\1"

SET_ID = struct.Struct(">Q")
PLACE = struct.Struct(">HI")
LEASE = struct.Struct("<Qd")
TOKEN = struct.Struct("<Q")


class Script(NamedTuple):
    """Lua that runs in the server. `text` is sent when the server does not know it by its hash yet."""

    text: str
    sha: str

    @classmethod
    def of(cls, text: str) -> Script:
        return cls(text, sha1(text.encode()).hexdigest())

    @classmethod
    def when_full(cls, text: str) -> Script:
        """One that a full server runs, too. Redis before 7 does not know the first line, and takes it for an error."""
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
PUT_IN, TAKE_OUT = Script.of(_CHANGE_ENTRIES), Script.when_full(_CHANGE_ENTRIES)
"""KEYS: the tag's counts, entries. ARGV: for each entry what it must be ("": absent), what it becomes, records more.
Answers for each: nil when it was changed, else what it is."""

ENTER_MEMBERS = Script.of("""
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
"""KEYS: a set's list. ARGV: 1 when read from files, else 0; place, chunk key, ... Answers nil when the list takes none,
else for each place 2: entered, 1: was there, 0: it is another chunk's."""

MARK_LIST = Script.when_full("""
local is_closing = ARGV[1] == 'g'
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
if is_closing or redis.call('HGET', KEYS[1], '') ~= 'g' then redis.call('HSET', KEYS[1], '', ARGV[1]) end
return is_closing and redis.call('HGETALL', KEYS[1]) or {}
""")
"""KEYS: a set's list. ARGV: its new state; a closed one stays so. Answers what is in it, when that closes it."""

MARK_MADE = Script.of("""
if redis.call('HGET', KEYS[1], 'made') == ARGV[1] then redis.call('HSET', KEYS[1], 'made', ARGV[2]) end
return 0
""")
"""KEYS: a hash with such a field. ARGV: what it must be, what it becomes."""

PUT_NOTE = Script.when_full("return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])")
"""KEYS: the notes. ARGV: name, note."""

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
ADD_TO_TABLE, CHANGE_TABLE = Script.of(_CHANGE_TABLE), Script.when_full(_CHANGE_TABLE)
"""KEYS: a hash, the sum of bytes, the leases. ARGV: a lease and the token that it must have ("": whatever); for each
field of the hash its name, what it must be, what it becomes, bytes more. Answers nil when the token is another, else
for each field nil when it was changed, or what it is."""

SCRIPTS = {
    script.sha: script.text
    for script in (PUT_IN, TAKE_OUT, ENTER_MEMBERS, MARK_LIST, MARK_MADE, PUT_NOTE, ADD_TO_TABLE, CHANGE_TABLE)
}


class Keys:
    """Names of keys. `tags`: 1 on one server, TAGS in a cluster."""

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
        """For SCAN of strings; a chunk key may hold any bytes, and has 16 of them. Hashes of an index under
        `P:e:<more>` match it, too (its leases, its sets), but no string does."""
        return self._prefix + (b":e:" if self.tags == 1 else b":{???}:") + b"?" * 16

    @property
    def list_pattern(self) -> bytes:
        return b"%s:{%s}" % (self._prefix, b"?" * 16)
