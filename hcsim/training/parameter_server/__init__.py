"""A parameter server: it holds the model; workers pull it, compute gradients and push them.

`rounds` is the state machine, `server` and `worker` do the I/O, `strategy` runs them on a group of ranks.
"""
