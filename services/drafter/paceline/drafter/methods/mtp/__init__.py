"""The method ``mtp``: heads for multi-token prediction, in a target's own files or beside them.

See DeepSeek-V3 (arXiv 2412.19437), section 2.2. Training imports
:mod:`~paceline.drafter.methods.mtp.module`, a head in dense PyTorch.
"""

from paceline.drafter.methods.mtp.config import MtpConfig, read_mtp, save_mtp
from paceline.drafter.methods.mtp.module import MtpModel

__all__ = ["MtpConfig", "MtpModel", "read_mtp", "save_mtp"]
