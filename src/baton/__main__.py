"""The entry point of the ``baton`` command: it only hands over to the command line."""

from __future__ import annotations


def main() -> None:
    """Run the command line; exits the process with its status."""
    from baton.ops.cli import cli

    cli(prog_name="baton")


if __name__ == "__main__":
    main()
