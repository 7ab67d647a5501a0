"""The all-reduces that are measured side by side: one file per library, and what drives them.

`peer` says what a library has to offer, `rank` is the process of one rank, `team` starts and
commands all ranks of one library, `memory` reads what a process occupies.
"""
