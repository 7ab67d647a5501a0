"""Run an unmodified torch script on a virtual cluster: `hcsim run train.py`.

Each rank is a process of its own that really computes. Blocking operations (collectives, the store, sleep, the
clock) are requests to the simulator, which answers at a virtual time. The rank counts its own computation and
reports it; the simulator charges it to the virtual machine.

- `ipc`: the IPC protocol between a rank and the simulator, and their shared memory
- `processes`, `fork_server`, `environment`: starting and ending ranks, and their environment
- `rank_proxy`: the simulator's side of one rank, with its groups; `store`: the key-value store
- `run`: a whole run and the load of each link; `member`: one rank of a real cluster
- `rank`: the code in a rank's process, and the only part that uses torch
"""
