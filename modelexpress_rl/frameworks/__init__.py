"""Adapters for RL frameworks that hand weights over as a stream of whole tensors; see docs/frameworks.

Frameworks that call the clients themselves (PRIME-RL, NeMo-RL) need none.
"""
