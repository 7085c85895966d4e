"""A Paceline drafter in transformers' own ``generate``, in one line and without services.

model.generate(**inputs, custom_generate=PacelineAssistant("ngram"))
"""

from paceline.assistant.assistant import AssistantStats, PacelineAssistant

__all__ = ["AssistantStats", "PacelineAssistant"]
