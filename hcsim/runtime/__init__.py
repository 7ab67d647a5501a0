"""The seam: everything that differs between the virtual and the real world, as interfaces.

A component is an ordinary `async def` over a `Host`. It takes time, channels, the LAN,
compute, randomness and tracing from there and from nowhere else.
"""
