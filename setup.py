"""The compiled parts of the package; everything else stands in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "hcsim.compressors.kernels.compiled",
            sources=["hcsim/compressors/kernels/compiled.c"],
            depends=[f"hcsim/compressors/kernels/{name}.h" for name in ("loops", "choice", "products")],
            extra_compile_args=["-O3", "-ffp-contract=off"],
            py_limited_api=True,
            optional=True,  # without a compiler, hcsim/compressors/kernels/plain.py does the same
        ),
        Extension(
            "hcsim.real.folding",
            sources=["hcsim/real/folding.c"],
            extra_compile_args=["-O3", "-ffp-contract=off"],
            py_limited_api=True,
            optional=True,  # without a compiler, numpy adds what has been received
        ),
        Extension(
            "hcsim.real.rings",
            sources=["hcsim/real/rings.c"],
            extra_compile_args=["-O3", "-ffp-contract=off"],
            py_limited_api=True,
            optional=True,  # without a compiler, processes of one machine talk over TCP
        ),
    ]
)
