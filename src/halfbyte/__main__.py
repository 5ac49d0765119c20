"""`python -m halfbyte`: the command line without an installed script."""

from halfbyte.cli import main

main()
