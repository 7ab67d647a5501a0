"""The inner loops of the compressors: compiled where the install found a compiler, else by numpy and torch.

All give the same bits and refuse the same; only their speed differs. Products with matrices of one rank's own (`dots`,
`sums`) are added in another order, so that their last bits differ too, as they do between unlike machines.
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
