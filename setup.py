"""The compiled parts of the package; everything else stands in pyproject.toml."""

import platform
import sys
from posixpath import normpath

from setuptools import Extension, setup


def compiled(name: str, *flags: str, depends: tuple[str, ...] = ()) -> Extension:
    """A module of one C file; where it cannot be compiled, the package does without it."""
    path = name.replace(".", "/")
    return Extension(
        name,
        sources=[f"{path}.c"],
        depends=[normpath(f"{path}/../{file}") for file in depends],
        extra_compile_args=["-O3", "-ffp-contract=off", *flags],
        py_limited_api=True,
        optional=True,
    )


LOOPS = tuple(f"{name}.h" for name in ("loops", "halves", "choice", "products"))
SUMS = ("sums.h", "moves.h", "halves.h")


def modules(machine: str, system: str) -> list[Extension]:
    """The modules for a processor, as `platform.machine()` calls it, and a `sys.platform`."""
    found = [
        # Without it, plain.py beside it does the same. It does not need avx2.c; archives of sources made anywhere do.
        compiled("hcsim.compressors.kernels.compiled", depends=("avx2.c", *LOOPS)),
        compiled("hcsim.real.folding", depends=SUMS),  # without it, numpy adds what has been received
        # Without it, processes of one machine talk over TCP.
        compiled("hcsim.real.shm.rings", depends=("belt.h", "ring.h", *(f"../{file}" for file in SUMS))),
    ]
    if machine == "x86_64":
        # On a Mac a Python for both kinds of processor has everything compiled for both.
        only_here = ["-Xarch_x86_64"] if system == "darwin" else []
        flags = [word for flag in ("-mavx2", "-mf16c", "-mbmi", "-mbmi2") for word in (*only_here, flag)]
        found.append(compiled("hcsim.compressors.kernels.avx2", *flags, depends=("compiled.c", *LOOPS)))
    return found


if __name__ == "__main__":
    setup(ext_modules=modules(platform.machine(), sys.platform))
