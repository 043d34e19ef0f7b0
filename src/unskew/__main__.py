"""`python -m unskew` is the command `unskew`."""

from unskew.cli.main import main

main()
