"""hcsim: train models on a home cluster of Macs, simulation first."""
