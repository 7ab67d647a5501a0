"""torch's DistributedDataParallel on the backend hcsim beside gloo, in one run: `python -m experiments.ddp`."""
