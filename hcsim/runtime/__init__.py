"""The interface between components and a world: everything that differs between the virtual and the real world.

A component is an ordinary `async def` over a `Host`. It takes time, channels, the LAN, compute, randomness and
tracing from the host only.
"""
