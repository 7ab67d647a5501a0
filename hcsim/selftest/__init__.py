"""`hcsim selftest`: whether hcsim does on this machine what it does everywhere else.

`contracts` and `collectives` hold what the interfaces between hcsim and a machine promise, as functions over hosts
that never learn which world they are in; the tests of hcsim run the same functions. `machine` and `elastic` hold what
only a real machine has. `checks` names all of them, and `runner` runs each in a process of its own: one that hangs or
crashes costs its own line.
"""
