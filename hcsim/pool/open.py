"""Which pool an address or a number of processes means."""

from __future__ import annotations

from hcsim.pool import Pool


def open_pool(jobs: int, dask: str | None = None) -> Pool:
    """Return a pool of so many local processes, or of the Dask cluster at an address (tcp://host:port, or
    ssh:host,host)."""
    if dask is not None:
        from hcsim.pool.dask import DaskPool

        return DaskPool(dask)
    from hcsim.pool.local import LocalPool

    return LocalPool(jobs)
