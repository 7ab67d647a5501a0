"""`python -m hcsim` is the command `hcsim`."""

from hcsim.cli import main

if __name__ == "__main__":
    main()
