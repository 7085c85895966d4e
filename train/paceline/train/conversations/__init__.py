"""Conversations that an instruct model writes alone, for training its drafters.

After Xu et al., "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with
Nothing": given the head of a user's turn, the model writes the question, then answers it.
"""

from paceline.train.conversations.file import Conversation, read_conversations
from paceline.train.conversations.own import OwnTexts
from paceline.train.conversations.write import write_conversations

__all__ = ["Conversation", "OwnTexts", "read_conversations", "write_conversations"]
