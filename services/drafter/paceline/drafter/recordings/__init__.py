"""Texts that generations left behind, kept on this machine to learn from and to check against."""

from paceline.drafter.recordings.reader import read_recordings
from paceline.drafter.recordings.recorder import Recorder
from paceline.drafter.recordings.text import Recording

__all__ = ["Recorder", "Recording", "read_recordings"]
