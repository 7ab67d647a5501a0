"""A fuzzer for clusters: random homes under random faults, checked against safety and liveness invariants."""
