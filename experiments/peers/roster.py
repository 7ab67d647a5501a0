"""All peers by name, in the order of the columns; hcsim first."""

from __future__ import annotations

from experiments.peers.bare import BARE
from experiments.peers.gloo import GLOO
from experiments.peers.hcsim import HCSIM, HCSIM_TCP, HCSIM_TLS, HCSIM_TLS_TCP
from experiments.peers.mlx import HCSIM_MLX, MLX
from experiments.peers.mpi import OPEN_MPI

PEERS = {peer.name: peer for peer in (HCSIM, HCSIM_TCP, HCSIM_TLS, HCSIM_TLS_TCP, GLOO, MLX, HCSIM_MLX, OPEN_MPI, BARE)}
_ASKED = (HCSIM_TLS.name, HCSIM_TLS_TCP.name, HCSIM_MLX.name, BARE.name)
UNASKED = tuple(name for name in PEERS if name not in _ASKED)
"""Who is measured when nobody says whom: libraries, and without encryption, which the others do not have."""
