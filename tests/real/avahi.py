"""Avahi, which finds and publishes services on most Linux machines, on one of the machines of a test.

It has a message bus of its own, and its files are on a filesystem that nobody else sees: the machine's own Avahi, if
there is one, never hears of it.
"""

from __future__ import annotations

import itertools
import re
import shutil
from typing import NamedTuple

import pytest

from tests.real.namespaces import Machine, Process

_BUS = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/> <allow own="*"/> <allow send_destination="*"/> <allow receive_sender="*"/>
  </policy>
</busconfig>
"""
_CONFIG = "[server]\nhost-name=printer\nuse-ipv4=yes\nuse-ipv6=yes\n[wide-area]\nenable-wide-area=no\n"
_LOOKS = 60
"""Each takes about a second: whatever is to be seen is there long before."""
TYPE = "_hcsim._tcp"


class Seen(NamedTuple):
    """A service as `avahi-browse` shows it."""

    name: str
    host: str
    port: int
    text: dict[str, str]


class Avahi:
    """An Avahi that runs on that machine, called printer.local."""

    def __init__(self, machine: Machine) -> None:
        for program in ("avahi-daemon", "avahi-browse", "avahi-publish", "avahi-resolve", "dbus-daemon"):
            if shutil.which(program) is None:
                pytest.skip(f"{program} is not installed (packages avahi-daemon, avahi-utils and dbus)")
        self._machine = machine
        socket, bus, config = (machine.folder / name for name in ("bus", "bus.conf", "avahi.conf"))
        bus.write_text(_BUS.format(socket=socket))
        config.write_text(_CONFIG)
        self._environment = f"DBUS_SYSTEM_BUS_ADDRESS=unix:path={socket}"
        machine.start("dbus-daemon", "--nofork", f"--config-file={bus}", "--print-address").says("unix:path")
        daemon = f"mount -t tmpfs none /run && exec avahi-daemon --no-drop-root --no-rlimits --no-chroot -f {config}"
        self._start("sh", "-c", daemon).says("startup complete")

    def _start(self, *command: str) -> Process:
        return self._machine.start("env", self._environment, *command)

    def publish(self, name: str, port: int, *text: str | bytes) -> Process:
        """Publish a service for as long as the process runs; returns once the others can see it."""
        process = self._start("avahi-publish", "-s", name, TYPE, str(port), *text)  # type: ignore[arg-type]
        process.says("Established")
        return process

    def resolve(self, version: int, host: str) -> str:
        """The address of a host in that version of IP."""
        process = self._start("avahi-resolve", f"-{version}", "-n", host)
        assert process.ends() == 0, process.text
        return process.lines[-1].split("\t")[1]

    def watch(self) -> Process:
        """Says a line for each service that comes (+), is resolved (=) and goes (-)."""
        return self._start("avahi-browse", "-rp", TYPE)

    def browse(self) -> list[Seen]:
        """What is in view now, over IPv4."""
        process = self._start("avahi-browse", "-rpt", TYPE)
        assert process.ends() == 0, process.text
        fields = [line.split(";", 9) for line in process.lines if line.startswith("=;eth0;IPv4;")]
        return [
            Seen(name, host, int(port), dict(re.findall(r'"([^="]*)=([^"]*)"', text)))
            for _, _, _, name, _, _, host, _, port, text in fields
        ]

    def sees(self, name: str, boot_other_than: str = "") -> Seen:
        """Look until there is one whose name begins so, in another life than that."""
        for _ in itertools.repeat(None, _LOOKS):
            found = [each for each in self.browse() if each.name.startswith(name)]
            if found and found[0].text.get("boot") != boot_other_than:
                assert len(found) == 1, found
                return found[0]
        raise AssertionError(f"avahi never saw {name}")
