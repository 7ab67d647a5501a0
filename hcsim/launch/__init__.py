"""The ways to start: a simulated cluster (`virtual`, `virtual_cluster`), or our place in a real one (`real`).

A program is an `async def` over a `Group`, the same in both worlds.
"""

DEFAULT_PORT = 52416
"""Where a rank listens that was given no port."""
