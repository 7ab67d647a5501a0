"""Code that runs in a rank's process: the script, and the replacements that present the simulated cluster to it."""
