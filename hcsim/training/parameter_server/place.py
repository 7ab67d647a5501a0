"""Where a parameter server listens, and where its workers call.

Left to itself, it listens at a free port of its machine's address in the group. With `server` and `listen` it may stand
behind a tunnel or a reverse proxy: workers call `server`, and what comes there is led to `listen`. The worker beside
the server calls it directly.

A tunnel takes calls from anybody. In a cluster, members prove on every channel who they are. Fixed ranks are told the
job's name over their group, with a number in it that nobody else knows; without it the server lets nobody in.
"""

from __future__ import annotations

from hcsim.config.training import Training
from hcsim.errors import ConfigError
from hcsim.runtime.address import address_at, hosts_of
from hcsim.runtime.channel import Listener
from hcsim.runtime.host import Host
from hcsim.runtime.target import Target, parse

_EVERYWHERE = ("0.0.0.0", "::")
_CARRIERS = {"wss": "ws"}
"""With and without TLS it is the same carrier: the tunnel may take it off."""


def check_place(settings: Training, *, has_server: bool) -> None:
    """Refuse a place where no server can be, or that nobody can call."""
    server, listen = settings.server, settings.listen
    if server is None and listen is None:
        return
    if not has_server:
        name = "listen" if server is None else "server"
        raise ConfigError(f'{name} = "{server or listen}": {settings.strategy} has no server; a parameter_server has')
    if server is None:
        raise ConfigError(f'listen = "{listen}": give server too: where do workers call, to be led there?')
    if listen is None:
        raise ConfigError(
            f'server = "{server}": give listen too: where is what comes there led to? '
            'For a tunnel that begins on the same machine, listen = "ws://127.0.0.1:8080"'
        )
    there, here = _parsed("server", server), _parsed("listen", listen)
    if any(host in _EVERYWHERE for host in there.hosts):
        raise ConfigError(f'server = "{server}": that is every machine and none; give a name or an address to call')
    for name, target in (("server", there), ("listen", here)):
        if target.port == 0:
            raise ConfigError(f'{name} = "{target.text}": give the port; a tunnel has to know it')
    if _carrier(there) != _carrier(here):
        raise ConfigError(
            f'server = "{server}" and listen = "{listen}" are of unlike kinds: nothing leads from one to the other'
        )


def address_of(settings: Training, first: str, port: int) -> str:
    """Where workers call a server on the first member's machine, which took that port."""
    return settings.server or address_at(hosts_of(first)[0], port)


async def listen(host: Host, settings: Training, first: str) -> tuple[Listener, int]:
    """Listen as the first member; and the port that was taken."""
    listener = await host.listen(settings.listen or address_at(hosts_of(first)[0], 0))
    return listener, parse(listener.address).port


def _parsed(name: str, text: str) -> Target:
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{name} = {error}") from None


def _carrier(target: Target) -> str:
    return _CARRIERS.get(target.scheme, target.scheme)
