"""``python -m edgespec``: the command line where its program is on no path."""

from edgespec.cli import main

if __name__ == "__main__":
    main()
