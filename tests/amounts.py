"""How much is drawn at random: everything in `make test-all`, a third of it in `make test` (tests/conftest.py)."""

from hypothesis import settings

WHOLE = 100  # Hypothesis' own number of examples: the profile of `make test` has fewer
LEAST = 5


def examples(number: int) -> int:
    """Of the examples that a property gets in `make test-all`, those that it gets now."""
    return max(min(number, LEAST), number * settings.default.max_examples // WHOLE)
