"""What a regular expression may cost before the back end is asked for it."""

from __future__ import annotations

import re

# Counts within counts, multiplied: the back end writes them out, and 10^6 of them hold a step up for seconds. A count
# of its own may be as large as it likes.
MAX_NESTED = 20_000
# What is repeated so often holds several things of any length, and the text has a length: where there are more pairs of
# a count and a length the back end lets tokens pass no more, and says nothing.
MAX_BESIDE_LENGTH = 5_000
_COUNT = re.compile(r"\{(\d{1,9})?(?:,(\d{0,9}))?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def check_counts(pattern: str, length: int = 0) -> None:
    """ValueError: counts within counts make too many, or one and the text's length do. length: the largest that is
    counted to, 0: none. What is not a regular expression is left to the back end."""
    groups = [1]  # how often something stands within a group that is open, at most
    last = 1  # the same of what a count would repeat
    free, last_free = [0], 0  # things of any length in these groups, and in what a count would repeat
    place = 0
    while place < len(pattern):
        letter = pattern[place]
        found = (
            _CLASS.match(pattern, place) if letter == "[" else _COUNT.match(pattern, place) if letter == "{" else None
        )
        if letter == "(":
            groups.append(1)
            free.append(0)
        elif letter == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1], last)
            last_free = free.pop()
            free[-1] += last_free
        elif letter == "{" and found and any(found.groups()):
            count = int(found[2] or found[1] or 1)
            if min(last, count) > 1 and last * count > MAX_NESTED:
                raise ValueError(
                    f"pattern: counts within counts may make {MAX_NESTED} if multiplied, not {last * count}"
                )
            if last_free > 1 and last * count * length > MAX_BESIDE_LENGTH:
                what = f"a count ({count}) of what holds several parts of any length, and a length ({length}),"
                raise ValueError(
                    f"pattern: {what} may make {MAX_BESIDE_LENGTH} if multiplied, not {last * count * length}"
                )
            last = max(last * count, 1)
            groups[-1] = max(groups[-1], last)
        elif letter not in "+*?":
            last, last_free = 1, 0
        if letter in "+*" or (found is not None and letter == "{" and found[2] == ""):
            free[-1] += 1
        place = found.end() if found else place + (2 if letter == "\\" else 1)
