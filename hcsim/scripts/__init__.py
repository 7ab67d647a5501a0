"""A person's own torch script, unmodified, on a virtual cluster: `hcsim run train.py`.

Each rank is a process of its own that really computes. Whatever it would wait for (a collective, the store, sleep, the
clock) it asks the simulator, which answers at a virtual time. What it computes is counted there and charged here.

- `conversation`, `arena`: what both sides say to each other, and the memory that they share
- `processes`, `fork_server`, `environment`: how ranks are started and ended, and what they find when they begin
- `attendant`: the simulator's side of one rank; `groups`, `store`: its groups, and the key-value store
- `run`: all of it together, and how busy each link was; `member`: the same for one rank of a real cluster
- `rank`: everything that runs in a rank's process, and the only part that uses torch
"""
