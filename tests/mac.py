"""Compiles and links the C modules for Macs, on any machine: `python tests/mac.py`, with the compiler of `ziglang`.

Warnings are errors. The files and their flags are those of setup.py on such a Mac. The headers of Python are those of
the Python that runs this, as python.org has one set for Linux and macOS, except for pyconfig.h. Of that, the limited
API that the modules keep to depends on the sizes of types, and those are compared with the target's.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGETS = {"arm64": "aarch64-macos.14.0", "x86_64": "x86_64-macos.14.0"}
"""By what `platform.machine()` says there. torch's packages for macOS ask for version 14."""
STRICT = ("-Wall", "-Wextra", "-Werror")
LINKED = ("-shared", "-fPIC", "-undefined", "dynamic_lookup")
SIZES = {"short": "SHORT", "int": "INT", "long": "LONG", "long long": "LONG_LONG", "size_t": "SIZE_T",
         "void *": "VOID_P", "wchar_t": "WCHAR_T", "time_t": "TIME_T", "pid_t": "PID_T"}  # fmt: skip


def compiler(target: str, *arguments: str | Path) -> list[str]:
    include = sysconfig.get_path("include")
    return [sys.executable, "-m", "ziglang", "cc", "-target", target, f"-I{include}", *STRICT, *map(str, arguments)]


def commands(into: Path) -> dict[str, list[str]]:
    """The commands, by what they compile."""
    checks = [f'_Static_assert(SIZEOF_{name} == sizeof({kind}), "{kind}");' for kind, name in SIZES.items()]
    includes = ["pyconfig.h", "stddef.h", "time.h", "sys/types.h"]
    sizes = into / "sizes.c"
    sizes.write_text("\n".join([*(f"#include <{header}>" for header in includes), *checks, ""]), encoding="utf-8")
    modules = runpy.run_path(str(ROOT / "setup.py"))["modules"]
    found = {}
    for machine, target in TARGETS.items():
        found[f"sizes of types for {target}"] = compiler(target, "-c", sizes, "-o", into / f"{target}.o")
        for module in modules(machine, "darwin"):
            output = into / f"{module.name}-{target}.so"
            flags = [*module.extra_compile_args, *LINKED]
            found[f"{module.name} for {target}"] = compiler(target, *flags, *module.sources, "-o", output)
    return found


def compiled(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {name: pool.submit(compiled, command) for name, command in commands(Path(folder)).items()}
        for name, job in jobs.items():
            done = job.result()
            failed += done.returncode != 0
            print(f"{name}: {'ok' if done.returncode == 0 else 'FAILED'}")
            if done.returncode:
                print(done.stderr or done.stdout, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
