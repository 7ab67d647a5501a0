"""Modules that torch lacks on CPU and MPS, for user-defined models, on any process group and device and in both
worlds.
"""
