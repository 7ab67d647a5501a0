"""The runtime interface on physical machines: real time, TCP, files."""
