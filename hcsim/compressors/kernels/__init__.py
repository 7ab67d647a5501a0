"""The inner loops of the compressors: compiled where the installation found a compiler, otherwise with numpy and
torch.

All variants return the same bits and reject the same input; only their speed differs. Products with matrices
that belong to one rank (`dots`, `sums`) are an exception: they are added in another order, so their last bits
differ, as they do between different machines.
"""

try:
    from hcsim.compressors.kernels.avx2 import *  # noqa: F403 - all of them, or none

    COMPILED = True
except ImportError:  # no x86, or one without AVX2
    try:
        from hcsim.compressors.kernels.compiled import *  # noqa: F403

        COMPILED = True
    except ImportError:
        from hcsim.compressors.kernels.plain import *  # noqa: F403

        COMPILED = False
