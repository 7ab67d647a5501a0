"""What torch lacks on CPU and MPS, for modules of one's own: on any process group, on any device, in both worlds."""
