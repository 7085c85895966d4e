"""`python -m paceline.train`: the same as `paceline train`."""

import argparse

from paceline.train.cli import add_arguments, run

parser = argparse.ArgumentParser(
    allow_abbrev=False, prog="paceline train", description="Train models for Paceline."
)
add_arguments(parser)
raise SystemExit(run(parser.parse_args()))
