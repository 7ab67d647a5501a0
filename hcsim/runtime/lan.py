"""The local network as a place where services announce themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import msgspec


class Service(msgspec.Struct, frozen=True):
    """One announcement: a name, where it is reached, and what it says about itself."""

    name: str
    address: str
    properties: Mapping[str, str] = {}


class Sighting(msgspec.Struct, frozen=True):
    """A service came into view, changed, or (`gone`) left."""

    service: Service
    gone: bool = False


class Lan(Protocol):
    """Advertise and browse services (mDNS, or a modelled broadcast domain)."""

    async def advertise(self, service: Service) -> str:
        """Announce a service until it is withdrawn; announcing the name again replaces it.

        Returns the name that others see: another one where somebody else announces that name already. Here the service
        keeps its name."""

    async def withdraw(self, name: str) -> None:
        """Say goodbye; those who browse are told."""

    def browse(self) -> AsyncIterator[Sighting]:
        """All services in view, then every change, our own included."""
