"""`python -m kizuki` is the command line."""

from .cli import main

main()
