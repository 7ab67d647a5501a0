"""A parameter server: it holds the model; workers pull it, compute gradients and push them.

`rounds` decides, `server` and `worker` move the bytes, `strategy` puts them onto a group of ranks.
"""
