"""The options of a checkpoint: what is kept, what is compared, and where a second run ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch.utils import checkpoint as pytorch

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_CHECKS = ("default", "none")


@dataclass(frozen=True)
class CheckpointOptions:
    """How a function is checkpointed; the meaning is that of :func:`checkpoint`'s arguments.

    Raises:
        ValueError: for a ``determinism_check`` that does not exist.
    """

    preserve_rng_state: bool = True
    early_stop: bool = True
    context_fn: Callable[[], Contexts] | None = None
    determinism_check: str = "default"
    debug: bool = False
    writes_again: bool = False

    def __post_init__(self) -> None:
        if self.determinism_check not in _CHECKS:
            raise ValueError(
                f"determinism_check is {self.determinism_check!r}: it must be one of {_CHECKS}"
            )

    @property
    def stops_early(self) -> bool:
        """Whether the second run may end early.

        ``torch.utils.checkpoint.set_checkpoint_early_stop`` overrides the option.
        """
        enabled: bool | None = getattr(pytorch, "_enable_checkpoint_early_stop", None)
        return self.early_stop if enabled is None else enabled

    @property
    def debugs(self) -> bool:
        """Whether both runs log their operators, for the message of a ``CheckpointError``.

        ``torch.utils.checkpoint.set_checkpoint_debug_enabled`` overrides the option.
        """
        enabled: bool | None = getattr(pytorch, "_checkpoint_debug_enabled", None)
        return self.debug if enabled is None else enabled
