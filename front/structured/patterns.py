"""What a regular expression may cost before the back end is asked for it."""

from __future__ import annotations

import re

# Counts within counts, multiplied: the back end writes them out, and 10^6 of them hold a step up for seconds. A count
# of its own may be as large as it likes.
MAX_NESTED = 20_000
_COUNT = re.compile(r"\{(\d{1,9})?(?:,(\d{0,9}))?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def check_counts(pattern: str) -> None:
    """ValueError: counts within counts make too many. What is not a regular expression is left to the back end."""
    groups = [1]  # how often something stands within a group that is open, at most
    last = 1  # the same of what a count would repeat
    place = 0
    while place < len(pattern):
        letter = pattern[place]
        found = (
            _CLASS.match(pattern, place) if letter == "[" else _COUNT.match(pattern, place) if letter == "{" else None
        )
        if letter == "(":
            groups.append(1)
        elif letter == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1], last)
        elif letter == "{" and found and any(found.groups()):
            count = int(found[2] or found[1] or 1)
            if min(last, count) > 1 and last * count > MAX_NESTED:
                raise ValueError(
                    f"pattern: counts within counts may make {MAX_NESTED} if multiplied, not {last * count}"
                )
            last = max(last * count, 1)
            groups[-1] = max(groups[-1], last)
        elif letter not in "+*?":
            last = 1
        place = found.end() if found else place + (2 if letter == "\\" else 1)
