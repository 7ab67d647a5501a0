"""Channels through memory that processes of one machine share, in place of connections over its loopback.

Two processes meet at a Unix socket beside the address that one of them listens at (`rendezvous`), and then have a
stream through two rings of bytes in that memory (`stream`; the rings are in C). What comes from one ring can be
forwarded to another without a stop in Python.
"""
