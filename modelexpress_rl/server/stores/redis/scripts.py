"""What a Redis does in one step.

Every script may be run again after its reply was lost: what it did is recognised, and answered once
more. The first two arguments of each are the time: in milliseconds, where a test's clock rules, or
empty; and the least that the time now can be (`clock.py`). Nothing is written before everything that
can be refused has been checked.

Nothing is answered that only a primary can know unless something was written, if only nothing (`HDEL` of
no field): a replica refuses that. One that has just lost its part as the primary, and is about to be
filled from the new one, would otherwise say for a moment that there is nothing.

Redis refuses to grow where its memory is used up, unless the script has written before. A commit that
shrinks its record, or leaves its size, therefore begins with a write of nothing, too: so leases are still
renewed then, and versions still released, retired and forgotten.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

# How many commits of one record are remembered by their tokens, so that one whose reply was lost is known.
# A version has many committers at once, a worker has one.
VERSION_REMEMBERS = 32
WORKER_REMEMBERS = 4


@dataclass(frozen=True, slots=True)
class Script:
    """A script, and the digest that Redis keeps it by."""

    body: str
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.sha1(self.body.encode()).hexdigest())


_CLOCK = """
local function now_us()
  if ARGV[1] ~= '' then return tonumber(ARGV[1]) * 1000 end
  local time = redis.call('TIME')
  return math.max(tonumber(time[1]) * 1000000 + tonumber(time[2]), tonumber(ARGV[2]) * 1000)
end
local function whole(number) return string.format('%.0f', number) end
local function ms(us) return whole(math.floor(us / 1000)) end
"""

# KEYS: a key. ARGV: a command, and its words after the key. Answers as it does. The key may be no hash; a
# replica refuses the write before it looks.
COMMAND = Script(
    """
local written = redis.pcall('HDEL', KEYS[1], '')
if type(written) == 'table' and not string.find(written.err, 'WRONGTYPE', 1, true) then return written end
return redis.call(ARGV[3], KEYS[1], unpack(ARGV, 4))
"""
)

# KEYS: records. ARGV: of each, the revision whose body need not be sent, where there is one.
# Answers the time, then of each record its revision, wake and body.
READ = Script(
    _CLOCK
    + """
redis.call('HDEL', KEYS[1], '')
local answer = {ms(now_us())}
for i, key in ipairs(KEYS) do
  local row = redis.call('HMGET', key, 'revision', 'wake')
  local known = ARGV[2 + i]
  answer[#answer + 1] = row[1]
  answer[#answer + 1] = row[2]
  answer[#answer + 1] = row[1] and row[1] ~= known and redis.call('HGET', key, 'body')
end
return answer
"""
)

# KEYS: the record, its listing, the listing of the active, the due ones, the newest revision.
# ARGV: token, expected revision, valid until, wake, body, member, active, lifetime of the record and of
# the indexes, name, idempotency key, channel, bucket, how many commits are remembered. Empty text is None,
# and no body erases.
# Answers OK, revision, idempotency key; or CONFLICT, LATE, or FORGOTTEN: another revision is stored, and
# too many have been since to know whether one of them was this commit.
COMMIT = Script(
    _CLOCK
    + """
local token, expected, valid_until, wake, body = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local member, active, lifetime, keep = ARGV[8], ARGV[9], ARGV[10], ARGV[11]
local name, owed, channel, bucket, most = ARGV[12], ARGV[13], ARGV[14], ARGV[15], tonumber(ARGV[16])
local us = now_us()
local row = redis.call('HMGET', KEYS[1], 'revision', 'tokens', 'member', 'owed')
local revision, tokens = row[1], row[2] or ''

local done = string.match(tokens, token .. '=(%d+);')
if done then return {'OK', done, row[4] or ''} end
if (revision or '') ~= expected then
  redis.call('HDEL', KEYS[1], '')
  local remembered = {}
  for one in string.gmatch(tokens, '=(%d+);') do remembered[#remembered + 1] = tonumber(one) end
  if #remembered == most and remembered[#remembered] > (tonumber(expected) or 0) then return {'FORGOTTEN'} end
  return {'CONFLICT'}
end
if valid_until ~= '' and us >= tonumber(valid_until) * 1000 then return {'LATE'} end

local newest = redis.call('GET', KEYS[5]) or '0'
local next_revision = whole(math.max(us, tonumber(newest) + 1, tonumber(revision or '0') + 1))
tokens = token .. '=' .. next_revision .. ';' .. tokens
local count, at = 0, 0
while count < most do
  local found = string.find(tokens, ';', at + 1, true)
  if not found then break end
  count, at = count + 1, found
end
tokens = string.sub(tokens, 1, at)

if body == '' then
  redis.call('DEL', KEYS[1])
  if row[3] then
    redis.call('ZREM', KEYS[2], row[3])
    redis.call('ZREM', KEYS[3], row[3])
    member = row[3]
  end
  redis.call('ZREM', KEYS[4], name)
  redis.call('HSET', KEYS[1], 'tokens', tokens, 'owed', row[4] or '')
  redis.call('PEXPIRE', KEYS[1], 60000)
  owed = row[4] or ''
else
  if revision and #body <= redis.call('HSTRLEN', KEYS[1], 'body') then redis.call('ZREM', KEYS[4], '') end
  redis.call('HSET', KEYS[1], 'revision', next_revision, 'wake', wake, 'body', body,
    'tokens', tokens, 'member', member, 'owed', owed, 'kept', lifetime == keep and '1' or '0')
  redis.call('PEXPIRE', KEYS[1], lifetime)
  redis.call('ZADD', KEYS[2], 0, member)
  redis.call('PEXPIRE', KEYS[2], keep)
  if row[3] and row[3] ~= member then
    redis.call('ZREM', KEYS[2], row[3])
    redis.call('ZREM', KEYS[3], row[3])
  end
  if active == '1' then
    redis.call('ZADD', KEYS[3], 0, member)
    redis.call('PEXPIRE', KEYS[3], keep)
  else
    redis.call('ZREM', KEYS[3], member)
  end
  if wake == '' then
    redis.call('ZREM', KEYS[4], name)
  else
    redis.call('ZADD', KEYS[4], wake, name)
    redis.call('PEXPIRE', KEYS[4], keep)
  end
end
redis.call('SET', KEYS[5], next_revision, 'PX', keep)
if channel ~= '' and member ~= '' then
  redis.call('PUBLISH', channel, bucket .. ' ' .. newest .. ' ' .. next_revision .. ' ' .. member)
end
return {'OK', next_revision, owed}
"""
)

# KEYS: the record, the due ones. ARGV: expected revision, wake, name, lifetime of the index.
REARM = Script(
    """
if redis.call('HGET', KEYS[1], 'revision') ~= ARGV[3] then return 0 end
if ARGV[4] == '' then
  redis.call('ZREM', KEYS[2], ARGV[5])
else
  redis.call('ZREM', KEYS[2], '')
  redis.call('ZADD', KEYS[2], ARGV[4], ARGV[5])
  redis.call('PEXPIRE', KEYS[2], ARGV[6])
end
redis.call('HSET', KEYS[1], 'wake', ARGV[4])
return 1
"""
)

# KEYS: the record, its listing, the listing of the active, the due ones. ARGV: member, name.
# Takes out of the indexes a record that Redis itself has let go of.
SWEEP = Script(
    """
if redis.call('HEXISTS', KEYS[1], 'revision') == 1 then return 0 end
redis.call('ZREM', KEYS[2], ARGV[3])
redis.call('ZREM', KEYS[3], ARGV[3])
redis.call('ZREM', KEYS[4], ARGV[4])
return 1
"""
)

# KEYS: the idempotency key, the claims. ARGV: uid, holder, name, lifetime. Answers the holder.
CLAIM = Script(
    _CLOCK
    + """
local holder = redis.call('HGET', KEYS[1], 'body')
if not holder then
  redis.call('HSET', KEYS[1], 'uid', ARGV[3], 'body', ARGV[4])
  holder = ARGV[4]
end
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('ZADD', KEYS[2], ms(now_us()), ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
return holder
"""
)

# KEYS: the idempotency key, the claims. ARGV: uid, name, claimed before (or empty). Answers whether freed.
FREE = Script(
    """
redis.call('HDEL', KEYS[1], '')
local claimed = redis.call('ZSCORE', KEYS[2], ARGV[4])
if ARGV[5] ~= '' and claimed and tonumber(claimed) >= tonumber(ARGV[5]) then return 0 end
local uid = redis.call('HGET', KEYS[1], 'uid')
if uid and uid ~= ARGV[3] then return 0 end
redis.call('ZREM', KEYS[2], ARGV[4])
return redis.call('DEL', KEYS[1])
"""
)

# KEYS: meta, the sweeper. ARGV: an id for a new store, this server or empty, how long the sweeper stays,
# whether a sequence is wanted, lifetime. Answers the time, the store's id, the sequence, and whether this
# server is the sweeper. The time is noted once a second, so that it goes on after everything restarted.
META = Script(
    _CLOCK
    + """
redis.call('HDEL', KEYS[1], '')
local row = redis.call('HMGET', KEYS[1], 'id', 'clock', 'sequence')
local us = now_us()
if ARGV[1] == '' then us = math.max(us, tonumber(row[2] or '0') * 1000) end
local id, sequence, sweeps = row[1], '', 1
if not id then
  id = ARGV[3]
  redis.call('HSET', KEYS[1], 'id', id)
end
if ARGV[6] == '1' then
  sequence = whole(math.max(tonumber(row[3] or '0') + 1, math.floor(us / 1000)))
  redis.call('HSET', KEYS[1], 'sequence', sequence)
end
if not row[2] or us / 1000 - tonumber(row[2]) >= 1000 then
  redis.call('HSET', KEYS[1], 'clock', ms(us))
  redis.call('PEXPIRE', KEYS[1], ARGV[7])
end
if ARGV[4] ~= '' then
  local owner = redis.call('GET', KEYS[2])
  if owner and owner ~= ARGV[4] then
    sweeps = 0
  else
    redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[5])
  end
end
return {ms(us), id, sequence, sweeps}
"""
)

# KEYS: the sweeper. ARGV: this server. It goes, and another may take its place at once.
RESIGN = Script(
    "if redis.call('GET', KEYS[1]) == ARGV[3] then return redis.call('DEL', KEYS[1]) end return 0"
)

# KEYS: a version. ARGV: lifetime. A version that ends by itself keeps its own.
TOUCH = Script(
    """
if redis.call('PTTL', KEYS[1]) > tonumber(ARGV[3]) then return 0 end
if redis.call('HGET', KEYS[1], 'kept') ~= '1' then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[3])
"""
)
