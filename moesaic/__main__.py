"""`moesaic`, and `python -m moesaic`: nothing of the other rooms is imported before it is clear that they are ours."""

import importlib
import sys

from moesaic.rooms import check_rooms


def main() -> None:
    try:
        check_rooms()
    except ImportError as error:
        print(f"moesaic: error: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        if sys.argv[1:2] == ["serve"] and not {"--help", "-h"} & {*sys.argv}:
            importlib.import_module("launch.early").start_early()  # while all else of a server is imported
        command_line = importlib.import_module("moesaic.cli")
    except KeyboardInterrupt:  # before the command line is there to say so
        print("moesaic: ended by SIGINT", file=sys.stderr)
        sys.exit(128 + 2)
    command_line.main()


if __name__ == "__main__":
    main()
