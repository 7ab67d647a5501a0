from hcsim.compressors.kernels.compiled import *  # noqa: F403
