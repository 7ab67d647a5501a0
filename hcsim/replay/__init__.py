"""Execution traces as programs: what another run computed and exchanged is done again, on other machines."""
