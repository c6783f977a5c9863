"""The conservation laws over a whole record: each as one SELECT with a row for every breach.

Owns how strictly measurements and tests ask: all that is on record, and every request must have
ended. The laws themselves are telemetry/sql/law/, which `iterscope lint` reads too. Never repairs
and never excuses: a row is a fault.
"""

from telemetry.named import Bound, of_kind


def laws() -> dict[str, Bound]:
    """Return law by law, under its title, the SELECT that finds its breaches."""
    found = {}
    for law in of_kind("law"):
        takes = {parameter.name for parameter in law.parameters}
        settled = {"open_s_max": 0} if "open_s_max" in takes else {}
        found[law.title] = law.bind({"from_unix_us": 0, **settled})
    return found
