"""What it costs to run a torch script on a virtual cluster, beside running its ranks alone."""
