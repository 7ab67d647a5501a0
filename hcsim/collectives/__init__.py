"""Collectives: algorithms as plans, one executor, one cost model, one verifier."""
