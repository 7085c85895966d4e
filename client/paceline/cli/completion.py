"""`paceline completion`: completion scripts for shells."""

import argparse

import shtab

from paceline.cli.main import COMMANDS, build_parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell's name."""
    parser.add_argument(
        "shell",
        choices=["bash", "zsh", "tcsh"],
        help='for bash, put `eval "$(paceline completion bash)"` into ~/.bashrc',
    )


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(shtab.complete(build_parser(COMMANDS), shell=args.shell))
    return 0
