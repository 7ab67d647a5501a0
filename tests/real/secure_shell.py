"""OpenSSH between the machines of a test: a server on some, and on one a client that knows how to get there.

Keys, configuration and host names are the test's own; nothing of the machine's ~/.ssh or /etc/ssh is read.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real.namespaces import REPOSITORY, Machine, Process

PORT = 2222
_SERVER = """
Port {port}
ListenAddress {ip}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
SetEnv HCSIM_HOME={folder} PYTHONPATH={repository} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 PATH={programs}:/usr/bin:/bin
"""
_CLIENT = """
Host {name}
    HostName {ip}
    Port {port}
    User root
    IdentityFile {folder}/id
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile none
"""
_HCSIM = """#!/bin/sh
exec {python} -c 'import hcsim.cli; hcsim.cli.main()' "$@"
"""


class SecureShell:
    """A client on the first machine, with `ssh` and `hcsim` in a folder of programs, and servers on the others."""

    def __init__(self, here: Machine, *there: Machine) -> None:
        sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
        ssh = shutil.which("ssh")
        if sshd is None or ssh is None:
            pytest.skip("sshd or ssh is not installed (packages openssh-server and openssh-client)")
        self._folder = here.folder.parent / "ssh"
        self.programs = here.folder.parent / "bin"
        for folder in (self._folder, self.programs):
            folder.mkdir()
        self._sshd = sshd
        self.config = self._folder / "config"
        self._program("hcsim", _HCSIM.format(python=sys.executable))
        self._program("ssh", f'#!/bin/sh\nexec {ssh} -F {self.config} "$@"\n')
        self.new_key()
        self.servers = {machine.name: self._serve(machine) for machine in there}

    def new_key(self) -> None:
        """The client has a key that no server has heard of, until one is started."""
        for name in ("id", "id.pub"):
            (self._folder / name).unlink(missing_ok=True)
        _keygen(self._folder / "id")

    def _serve(self, machine: Machine) -> Process:
        _keygen(machine.folder / "host_key")
        shutil.copy(self._folder / "id.pub", machine.folder / "authorized_keys")
        about = {"ip": machine.ip, "port": PORT, "folder": machine.folder, "programs": self.programs}
        config = machine.folder / "sshd_config"
        config.write_text(_SERVER.format(repository=REPOSITORY, **about))
        with self.config.open("a") as known:
            known.write(_CLIENT.format(**{**about, "folder": self._folder}, name=machine.name))
        key = (machine.folder / "host_key.pub").read_text()
        with (self._folder / "known_hosts").open("a") as hosts:
            hosts.write(f"[{machine.ip}]:{PORT} {key}")
        # The folder that sshd wants to find and the host's name are in namespaces of its own.
        begin = f"mount -t tmpfs none /run && mkdir /run/sshd && echo {machine.name} > /proc/sys/kernel/hostname"
        server = machine.start("unshare", "--uts", "sh", "-c", f"{begin} && exec {self._sshd} -D -e -f {config}")
        server.says("Server listening")
        return server

    def forget_hosts(self) -> None:
        """The client has never been there."""
        (self._folder / "known_hosts").write_text("")

    def _program(self, name: str, text: str) -> None:
        program = self.programs / name
        program.write_text(text)
        program.chmod(0o755)


def _keygen(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
