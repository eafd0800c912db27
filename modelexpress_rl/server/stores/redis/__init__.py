"""A store on Redis 6.2 to 8 or Valkey, standalone or a cluster, shared by any number of servers.

`address` says where it is, `keys` what lies where, `scripts` what is done in one step, `link` and
`node` how it is reached, `topology` which node has it, `trouble` what can be wrong with it.
"""

from modelexpress_rl.server.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
