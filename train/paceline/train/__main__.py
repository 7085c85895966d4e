"""`python -m paceline.train`: the same as `paceline train`."""

import argparse

from paceline.train.cli import add_arguments, main

parser = argparse.ArgumentParser(prog="paceline train", description="Train models for Paceline.")
add_arguments(parser)
raise SystemExit(main(parser.parse_args()))
