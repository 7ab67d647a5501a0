"""The seam on TCP: physical machines."""
