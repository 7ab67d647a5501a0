"""One check, in a process of its own: `python -m hcsim.selftest CHECK`. The last line of its output is the result."""

from __future__ import annotations

import sys
import traceback

import msgspec

from hcsim.doctor import CheckResult
from hcsim.errors import HcsimError
from hcsim.selftest.checks import CHECKS
from hcsim.selftest.contracts import NotHere


def main(name: str) -> None:
    """Run a check and print its result."""
    try:
        result = CheckResult(name, "good", CHECKS[name].run())
    except NotHere as error:
        result = CheckResult(name, "skipped", str(error))
    except HcsimError as error:
        result = CheckResult(name, "bad", str(error))
    except Exception as error:
        traceback.print_exc()
        result = CheckResult(name, "bad", f"{type(error).__name__}: {error}")
    sys.stdout.write("\n" + msgspec.json.encode(result).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
