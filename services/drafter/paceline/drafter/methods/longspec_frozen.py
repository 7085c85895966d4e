"""The target's embedding and LM head, as its drafters use them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from paceline.decoder import UnsupportedModelError, load_config
from paceline.decoder.linear import Linear
from paceline.decoder.weights import Checkpoint
from paceline.longspec.folder import EMBEDDING, HEAD

_TARGET_EMBEDDING = "model.embed_tokens.weight"


class SharesTarget(Protocol):
    """Shape of a drafter that shares its target's embedding and LM head."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden(self) -> int: ...


class Frozen:
    """Embedding and LM head.

    Where type and device are those of the file, the embedding is mapped from it and never copied:
    any number of drafters on a machine, and whoever else maps that file, have it in memory once.
    So is the head, unless it is small enough to be worth a faster, private copy.
    """

    def __init__(self, embedding: Tensor, head: Tensor, pack_bytes: int) -> None:
        """Take both tensors, ``[V, hidden]``; heads of at most ``pack_bytes`` are repacked."""
        self.embedding = embedding
        self._head = head
        packs = head.device.type == "cpu" and head.nbytes <= pack_bytes
        self._packed = Linear(head) if packs else None
        self.private_bytes = head.nbytes if packs else 0
        """Bytes of the repacked head."""

    def embedded(self, tokens: Tensor) -> Tensor:
        """Token ids ``[M]`` to float32 ``[M, hidden]``."""
        return self.embedding[tokens].float()

    def logits(self, hidden: Tensor) -> Tensor:
        """``[R, hidden]`` to ``[R, V]``, in the weights' type."""
        return linear(hidden, self._head) if self._packed is None else self._packed(hidden)

    @classmethod
    def read(
        cls,
        folder: Path,
        target: Path | None,
        config: SharesTarget,
        dtype: torch.dtype,
        device: torch.device | str,
        pack_bytes: int,
    ) -> Frozen:
        """From the drafter's own folder if it holds them, else from the target's.

        Args:
            folder: The drafter's.
            target: The target's, if given.
            config: The drafter's.
            dtype: Type of the model.
            device: Where it runs.
            pack_bytes: See :meth:`__init__`.

        Raises:
            UnsupportedModelError: Neither folder has them, or in another shape.
        """
        names = (EMBEDDING, HEAD)
        weights = Checkpoint(folder, dtype, device)
        if EMBEDDING not in weights:
            if target is None:
                raise UnsupportedModelError(
                    f"{folder} has no {EMBEDDING}: it shares the target's; give the target's "
                    "folder as the option target=DIR"
                )
            weights = Checkpoint(target, dtype, device)
            tied = load_config(target).tied
            names = (_TARGET_EMBEDDING, _TARGET_EMBEDDING if tied else HEAD)
        found: list[Tensor] = []
        for name in names:
            if name not in weights:
                raise UnsupportedModelError(f"{target or folder} lacks the tensor {name!r}")
            found.append(weights.mapped(name))
            if found[-1].shape != (config.vocab_size, config.hidden):
                raise UnsupportedModelError(
                    f"{name!r} of {target or folder} has shape {tuple(found[-1].shape)}, expected "
                    f"{(config.vocab_size, config.hidden)}"
                )
        return cls(found[0], found[1], pack_bytes)
