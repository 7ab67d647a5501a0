"""What runs in a rank's process: the script, and around it whatever has it believe that it is on a cluster."""
