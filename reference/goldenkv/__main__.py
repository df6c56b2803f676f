"""`python -m goldenkv`."""

from .cli import main

main()
