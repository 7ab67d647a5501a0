"""All peers by name, in the order of the columns; hcsim first."""

from __future__ import annotations

from experiments.peers.gloo import GLOO
from experiments.peers.hcsim import HCSIM, HCSIM_TLS
from experiments.peers.mlx import MLX
from experiments.peers.mpi import OPEN_MPI

PEERS = {peer.name: peer for peer in (HCSIM, HCSIM_TLS, GLOO, MLX, OPEN_MPI)}
UNASKED = tuple(name for name in PEERS if name != HCSIM_TLS.name)
"""Who is measured when nobody says whom: the others have no encryption, so neither has hcsim."""
