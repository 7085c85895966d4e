"""The method ``mtp``: heads for multi-token prediction, in a target's own files or beside them.

See DeepSeek-V3 (arXiv 2412.19437), section 2.2.
"""

from paceline.drafter.methods.mtp.config import MtpConfig, save_mtp

__all__ = ["MtpConfig", "save_mtp"]
