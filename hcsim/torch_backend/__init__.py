"""The torch.distributed backend `hcsim`."""
