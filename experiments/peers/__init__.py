"""The all-reduces that are measured side by side: one file per library, and what drives them.

`peer` says what a library has to offer, `rank` is the process of one rank, `team` are all ranks of one library,
`crew` starts and commands processes, `memory` reads what one occupies.
"""
