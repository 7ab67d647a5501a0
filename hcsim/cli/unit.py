"""`hcsim cluster unit`: the file by which a machine takes part whenever it is on, without anybody who logs in.

launchd's is a daemon, which runs as this user: it starts before a login, and macOS lets daemons use the local network
without asking. systemd's is a unit of this user; `loginctl enable-linger` starts it before a login. Both start the
command again when it fails.
"""

from __future__ import annotations

import getpass
import os
import plistlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from hcsim.cli import screen
from hcsim.cli.errors import BAD_INPUT
from hcsim.errors import ConfigError
from hcsim.real.keys import check_cluster_name

_AGAIN_S = 30
_STOP_S = 60
"""How long a node may take to leave in order."""
_COMMANDS = ("run", "rank", "coordinator")


class ServiceUnit(msgspec.Struct, frozen=True):
    """What a machine always does."""

    cluster: str
    command: tuple[str, ...]
    """The program and its arguments."""
    folder: Path
    """The working directory."""
    user: str
    home: Path
    environment: Mapping[str, str] = {}


def check_service(words: Sequence[str]) -> None:
    """Reject a command that no service can run."""
    if not words or words[0] not in _COMMANDS or (words[0] == "run" and "--real" not in words):
        raise ConfigError(
            "say what the machine does, after --: `hcsim cluster unit -- run --real job.toml --state FOLDER`; "
            "`rank …` and `coordinator …` are possible, too"
        )
    if "-" in words:
        raise ConfigError("- is standard input, and a service has none: give a file")
    for word in words:
        if not word.isprintable():
            raise ConfigError(f"{word!r}: a service's command is one line of printable characters")


def launchd(unit: ServiceUnit) -> str:
    """Return the property list of a daemon."""
    log = str(unit.home / "Library" / "Logs" / f"hcsim-{unit.cluster}.log")
    return plistlib.dumps(
        {
            "Label": f"hcsim.{unit.cluster}",
            "UserName": unit.user,
            "ProgramArguments": list(unit.command),
            "WorkingDirectory": str(unit.folder),
            "EnvironmentVariables": {"HOME": str(unit.home), **unit.environment},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _AGAIN_S,
            "ExitTimeOut": _STOP_S,
            "ProcessType": "Interactive",  # any other may be slowed down
            "StandardOutPath": log,
            "StandardErrorPath": log,
        },
        sort_keys=False,
    ).decode()


def systemd(unit: ServiceUnit) -> str:
    """Return a unit of the user."""
    environment = [f"Environment={_quoted(f'{name}={value}')}" for name, value in unit.environment.items()]
    lines = [
        "[Unit]",
        f"Description=hcsim in the cluster {unit.cluster}",
        "",
        "[Service]",
        f"ExecStart={_exec_start(unit.command)}",
        f"WorkingDirectory={_without_specifiers(str(unit.folder))}",
        *environment,
        "Restart=on-failure",
        f"RestartPreventExitStatus={BAD_INPUT}",
        f"RestartSec={_AGAIN_S}",
        f"TimeoutStopSec={_STOP_S}",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def print_unit(cluster: str, words: Sequence[str], *, for_launchd: bool) -> None:
    """Print the file, and on standard error how to install it."""
    check_cluster_name(cluster)
    check_service(words)
    variables = {name: os.environ[name] for name in ("HCSIM_HOME",) if name in os.environ}
    command = (sys.executable, "-m", "hcsim", *words)
    for place in (sys.executable, str(Path.cwd()), str(Path.home()), *variables.values()):
        if not place.isprintable():  # a line break would begin a line of the file's own
            raise ConfigError(f"{place!r}: a service's paths are of printable characters: rename the folder")
    unit = ServiceUnit(cluster, command, Path.cwd(), getpass.getuser(), Path.home(), variables)
    print((launchd if for_launchd else systemd)(unit), end="")
    for step in _installation(cluster, for_launchd=for_launchd):
        screen.note(step)


def _installation(cluster: str, *, for_launchd: bool) -> tuple[str, ...]:
    if for_launchd:
        file = f"/Library/LaunchDaemons/hcsim.{cluster}.plist"
        return (
            f"save it as {file}: … | sudo tee {file}",
            f"start it: sudo launchctl bootstrap system {file}",
            f"its output: ~/Library/Logs/hcsim-{cluster}.log; end it: sudo launchctl bootout system/hcsim.{cluster}",
        )
    name = f"hcsim-{cluster}"
    return (
        f"save it as ~/.config/systemd/user/{name}.service",
        f"start it: systemctl --user daemon-reload; systemctl --user enable --now {name}; loginctl enable-linger",
        f"its output: journalctl --user -u {name}; end it: systemctl --user disable --now {name}",
    )


def _exec_start(command: Sequence[str]) -> str:
    """Return the command for systemd, which replaces variables in the arguments and in the program's name, but not in
    the path of its file: where that has a $, the two are given apart."""
    words = [_quoted(word).replace("$", "$$") for word in command]
    return " ".join([_quoted(f"@{command[0]}"), *words] if "$" in command[0] else words)


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_without_specifiers(escaped)}"'


def _without_specifiers(text: str) -> str:
    return text.replace("%", "%%")
