"""The NIXL adapter of the transport port; importing it doesn't load NIXL yet.

agent      NixlAgent, the async face
driver     the one thread per agent that enters NIXL
core       what that thread does: peers, prepared reads, reads under way
binding    the part of NIXL's Python binding that is used, and its environment
listener   the metadata listener: ports, and whether it really listens
"""

from modelexpress_rl.transport.nixl.agent import NixlAgent

__all__ = ["NixlAgent"]
