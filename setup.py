"""The compiled parts of the package; everything else stands in pyproject.toml."""

import platform

from setuptools import Extension, setup


def compiled(name: str, *flags: str, depends: tuple[str, ...] = ()) -> Extension:
    """A module of one C file; where it cannot be compiled, the package does without it."""
    path = name.replace(".", "/")
    return Extension(
        name,
        sources=[f"{path}.c"],
        depends=[f"{path.rpartition('/')[0]}/{file}" for file in depends],
        extra_compile_args=["-O3", "-ffp-contract=off", *flags],
        py_limited_api=True,
        optional=True,
    )


LOOPS = ("loops.h", "halves.h", "choice.h", "products.h")
modules = [
    compiled("hcsim.compressors.kernels.compiled", depends=LOOPS),  # without it, plain.py beside it does the same
    compiled("hcsim.real.folding", depends=("moves.h",)),  # without it, numpy adds what has been received
    compiled("hcsim.real.rings", depends=("moves.h",)),  # without it, processes of one machine talk over TCP
]
if platform.machine() in ("x86_64", "AMD64"):
    wide = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2")
    modules.append(compiled("hcsim.compressors.kernels.avx2", *wide, depends=("compiled.c", *LOOPS)))

setup(ext_modules=modules)
