"""What can go wrong with a job, besides a lack of memory."""


class StepFailed(Exception):
    """A step could not be computed. Nothing of it was committed; it may be tried again."""


class SequenceClosed(Exception):
    """The sequence was released while work on it was waiting."""
