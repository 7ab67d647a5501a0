"""The ways to start: a simulated cluster (`virtual`, `virtual_cluster`), or this machine's part in a real one (`real`).

A program is an `async def` over a `Group`, the same for both.
"""

DEFAULT_PORT = 52416
"""The port of a rank whose address has none."""
