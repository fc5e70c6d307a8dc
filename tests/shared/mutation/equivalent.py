"""Mutants that no test can find, because the program does the same with them; each with the reason.

By target: function, line of source and change, as the report shows them. An entry that is no mutant any more, or that a
test finds, fails the session, so that the list stays as short as it can be.
"""

from __future__ import annotations

EQUIVALENT: dict[str, dict[tuple[str, str, str], str]] = {}
