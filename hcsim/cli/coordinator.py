"""`hcsim coordinator`: the place where workers meet, until it is interrupted."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hcsim.cli import screen
from hcsim.cluster.coordinator import Coordinator, Policy
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.tls import TlsFiles


def serve(listen: str, policy: Policy, tls: TlsFiles | None, insecure: bool, state: Path | None) -> None:
    """Serve workers, and say what happens, a line each."""
    asyncio.run(_serve(listen, policy, RealOptions("coordinator", tls=tls, insecure=insecure, state=state)))


async def _serve(listen: str, policy: Policy, options: RealOptions) -> None:
    async with RealHost(options) as host:
        coordinator = Coordinator(host, policy, note=screen.say)
        listener = await host.listen(listen)
        screen.say(f"coordinator at {listener.address}: waiting for {policy.workers} workers")
        coordinator.open(listener)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await coordinator.close()
            await listener.close()
