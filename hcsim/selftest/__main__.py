"""One check, in a process of its own: `python -m hcsim.selftest CHECK`. The last line of its output is the verdict."""

from __future__ import annotations

import sys
import traceback

import msgspec

from hcsim.errors import HcsimError
from hcsim.selftest.checks import CHECKS
from hcsim.selftest.contracts import NotHere
from hcsim.selftest.runner import Verdict


def main(name: str) -> None:
    """Run a check and print its verdict."""
    try:
        verdict = Verdict("good", CHECKS[name].run())
    except NotHere as error:
        verdict = Verdict("skipped", str(error))
    except HcsimError as error:
        verdict = Verdict("bad", str(error))
    except Exception as error:
        traceback.print_exc()
        verdict = Verdict("bad", f"{type(error).__name__}: {error}")
    sys.stdout.write("\n" + msgspec.json.encode(verdict).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
