"""`python -m strop`."""

from strop.cli import main

main()
