"""How a command prints its sentences."""

from rich.console import Console


def say(console: Console, text: str) -> None:
    """Prints a line as it is, however long; nothing in it is markup."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)
