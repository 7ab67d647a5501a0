"""All peers by name, in the order of the columns; hcsim first."""

from __future__ import annotations

from experiments.peers.gloo import GLOO
from experiments.peers.hcsim import HCSIM
from experiments.peers.mlx import MLX
from experiments.peers.mpi import OPEN_MPI

PEERS = {peer.name: peer for peer in (HCSIM, GLOO, MLX, OPEN_MPI)}
