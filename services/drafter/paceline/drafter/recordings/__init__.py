"""Texts of generations, recorded on this machine for training and for the load check."""

from paceline.drafter.recordings.recorder import Recorder
from paceline.drafter.recordings.recording import Recording, read_recordings

__all__ = ["Recorder", "Recording", "read_recordings"]
