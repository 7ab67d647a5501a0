"""Browsing by multicast DNS, with a browser that says what the test wants: what goes wrong is heard, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from zeroconf import ServiceStateChange

from hcsim.real import mdns
from hcsim.real.mdns import MdnsLan
from hcsim.runtime.host import Service


class Browser:
    """Hears of what it is told, until it is cancelled; and of one name more while that is under way."""

    def __init__(self, zeroconf: Any, note: Callable[[str, ServiceStateChange], None]) -> None:
        self._note = note
        Browser.latest = self

    latest: Browser

    def hear(self, name: str, change: ServiceStateChange = ServiceStateChange.Added) -> None:
        self._note(name, change)

    async def cancel(self) -> None:
        self.hear("late")
        await asyncio.sleep(0)


class Lan(MdnsLan):
    def __init__(self, resolve: Callable[[str], Any]) -> None:
        super().__init__()
        self._answer = resolve

    def _opened(self) -> Any:
        return SimpleNamespace(zeroconf=None)

    async def _resolve(self, name: str) -> Service | None:
        return await self._answer(name)  # type: ignore[no-any-return]

    def _cached(self, name: str) -> Service | None:
        return None


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mdns, "MdnsBrowser", Browser)


def test_what_a_resolution_raises_is_heard_by_who_browses() -> None:
    async def resolve(name: str) -> Service | None:
        raise ValueError("nobody thought of that")

    async def main() -> None:
        async with asyncio.timeout(10):
            sighting = asyncio.ensure_future(anext(Lan(resolve).browse()))
            await asyncio.sleep(0)
            Browser.latest.hear("bad")
            with pytest.raises(ValueError, match="nobody thought of that"):
                await sighting
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_who_stops_browsing_leaves_no_task_behind() -> None:
    stuck: list[str] = []

    async def resolve(name: str) -> Service | None:
        if name == "good":
            return Service(name, "127.0.0.1:4000", {})
        stuck.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)  # it has to let go of something
        return None

    async def main() -> None:
        async with asyncio.timeout(10):
            sightings = Lan(resolve).browse()
            sighting = asyncio.ensure_future(anext(sightings))
            await asyncio.sleep(0)
            for name in ("removed", "there", "good"):
                Browser.latest.hear(name)
            assert (await sighting).service.name == "good"
            Browser.latest.hear("removed", ServiceStateChange.Removed)
            await sightings.aclose()
            assert stuck == ["removed", "there", "late"]
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_name_that_is_removed_and_comes_again_is_resolved_again() -> None:
    asked = 0

    async def resolve(name: str) -> Service | None:
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.Event().wait()
        return Service(name, f"127.0.0.1:{asked}", {})

    async def main() -> None:
        async with asyncio.timeout(10):
            sightings = Lan(resolve).browse()
            for change in (ServiceStateChange.Added, ServiceStateChange.Updated):
                sighting = asyncio.ensure_future(anext(sightings))
                await asyncio.sleep(0)
                Browser.latest.hear("one", change)
                if change is ServiceStateChange.Added:
                    await asyncio.sleep(0)
                    Browser.latest.hear("one", ServiceStateChange.Removed)
                    Browser.latest.hear("one", change)
                assert (await sighting).service.address == f"127.0.0.1:{asked}"
            assert asked == 3
            await sightings.aclose()

    asyncio.run(main())
