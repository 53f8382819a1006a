"""`python -m moesaic` is `moesaic`."""

from moesaic.cli import main

main()
