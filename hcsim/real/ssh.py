"""Programs on other machines, started and ended through ssh.

A program reads its input from standard input, which then stays open. When it closes, because of a close here or
the end of this process or of the connection, the program knows that it is no longer attended. A connection that
dies silently closes nothing at the other end. Therefore an empty line is sent periodically, and the program may
take silence for the end. So no program is left running that would have to be ended by hand. Output comes back
line by line.
"""

from __future__ import annotations

import asyncio
import shlex
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from hcsim.errors import ConfigError, HcsimError

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")
"""Without password prompts, which would not show the machine that asks."""
SSH_FAILED = 255
NOT_FOUND = 127
_REFUSED = 2
_LINE_LIMIT_BYTES = 1 << 20
_ATTENTION_S = 5.0
_OTHERS_S = 12.0
"""How long a failure is kept back while other machines have neither begun nor failed: longer than ssh tries."""


async def start_ssh(
    host: str, command: Sequence[str], *, stdin: int = PIPE, stderr: int = STDOUT
) -> asyncio.subprocess.Process:
    """Run a command on a host. Its output comes through a pipe."""
    try:
        return await asyncio.create_subprocess_exec(
            *SSH, host, shlex.join(command), limit=_LINE_LIMIT_BYTES, start_new_session=True,
            stdin=stdin, stdout=PIPE, stderr=stderr,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"ssh cannot be started: {error.strerror}") from None


async def text_lines(output: asyncio.StreamReader | None) -> AsyncIterator[str]:
    """Yield each line that a program prints."""
    assert output is not None
    async for data in output:
        yield data.decode(errors="replace").rstrip()


class SshProcesses:
    """The programs started on other machines."""

    def __init__(self, tell: Callable[[str], None], sign: str) -> None:
        self._tell = tell
        self._sign = sign
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._attention: list[asyncio.Task[None]] = []
        self._let_go = False
        self._begun: dict[str, None] = {}
        self._failures: dict[str, str] = {}
        self._all: list[str] = []
        self._giving_up: asyncio.TimerHandle | None = None
        self.failed: asyncio.Future[HcsimError] = asyncio.get_running_loop().create_future()
        """Done, with the error, when programs could not start and the others have begun, or had the time to."""

    async def start_all(self, commands: Mapping[str, Sequence[str]], text: str) -> None:
        """Run a command on each of these hosts, with this text as input, and tell how far that is."""
        self._all += commands
        self._tell(f"starting on {', '.join(commands)}")
        for host, command in commands.items():
            await self.start(host, command, text)

    async def start(self, host: str, command: Sequence[str], text: str) -> None:
        """Run a command on a host, with this text as input."""
        if host.startswith("-") or not host:
            raise ConfigError(f"{host!r} is not the name of a host")
        process = await start_ssh(host, command)
        self._processes[host] = process
        if host not in self._all:
            self._all.append(host)
        self._watching[host] = asyncio.create_task(self._watch(host, process, command[0]), name=f"output of {host}")
        assert process.stdin is not None
        process.stdin.write(text.encode())
        self._attention.append(asyncio.create_task(_attend(process.stdin), name=f"attention to {host}"))
        with suppress(ConnectionError):  # why it has ended is told by whoever watches it
            await process.stdin.drain()

    def let_go(self) -> None:
        """Close the input of all programs, so that they end in an orderly way."""
        self._let_go = True
        if self._giving_up is not None:
            self._giving_up.cancel()
        for attention in self._attention:
            attention.cancel()
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()

    async def end(self, grace_s: float) -> None:
        """Let the programs end; after the grace period cut the remaining connections."""
        self.let_go()
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.gather(*self._watching.values())
        except TimeoutError:
            for host, process in self._processes.items():
                if process.returncode is None:
                    self._tell(f"{host}: does not end; its connection is cut")
                    process.terminate()
            await asyncio.gather(*self._watching.values(), return_exceptions=True)

    def cut(self) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                process.terminate()

    async def _watch(self, host: str, process: asyncio.subprocess.Process, program: str) -> None:
        last, begun = "", False
        async for line in text_lines(process.stdout):
            if line == self._sign:
                begun = True
                self._begun[host] = None
                if len(self._all) > 1:
                    self._tell(f"{host}: has begun ({len(self._begun)} of {len(self._all)})")
                self._settle()
            else:
                last = line
                self._tell(f"{host}: {last}")
        status = await process.wait()
        if status == SSH_FAILED and begun:
            self._tell(f"{host}: the connection to it is lost; what was started there ends by itself")
            return
        why = _failure(host, program, status, last.rstrip("."), begun or self._let_go)
        if why:
            if len(self._all) > 1:
                self._tell(f"{host}: has not begun: {why}")
            self._failures[host] = why
            self._settle()
        elif status:
            self._tell(f"{host}: ended with status {status}")

    def _settle(self) -> None:
        """Tell of all that have failed, once no other can any more."""
        if not self._failures or self.failed.done():
            return
        if all(host in self._begun or host in self._failures for host in self._all):
            self._give_up()
        elif self._giving_up is None:
            self._giving_up = asyncio.get_running_loop().call_later(_OTHERS_S, self._give_up)

    def _give_up(self) -> None:
        if self.failed.done():
            return
        whys = [self._failures[host] for host in self._all if host in self._failures]
        several = f"{len(whys)} of {len(self._all)} machines have not begun:" if len(whys) > 1 else ""
        self.failed.set_result(HcsimError("\n  ".join(filter(None, (several, *whys)))))


@asynccontextmanager
async def remotes(tell: Callable[[str], None], sign: str, grace_s: float) -> AsyncIterator[SshProcesses]:
    """Programs on other machines that end with this context; if it ends without an error, they have the grace period.

    A program prints the line `sign` to show that it has started."""
    others = SshProcesses(tell, sign)
    try:
        yield others
    except BaseException:
        others.let_go()
        others.cut()
        raise
    finally:
        await others.end(grace_s)


async def _attend(stdin: asyncio.StreamWriter) -> None:
    while not stdin.is_closing():
        await asyncio.sleep(_ATTENTION_S)
        stdin.write(b"\n")


def _failure(host: str, program: str, status: int, last: str, begun: bool) -> str:
    """Return the reason why a program did not start; empty if it did, or need not any more."""
    if status == SSH_FAILED:
        return f"ssh does not get to {host}: {last or 'it gave no reason'}; try `ssh {host} true` until that works"
    if status == NOT_FOUND:
        return f"{host} has no program {program!r}: say what it is called there (--set remote_hcsim=/path/to/hcsim)"
    if status == _REFUSED:
        return f"{host} cannot take part: {last}"
    said = f": {last}" if last else " and gave no reason"
    return "" if begun else f"{program} did not begin on {host}: it ended with status {status}{said}"
