"""Which modules of a model are running while it is traced, and which one an exception comes from.

Where an export fails, this tells which module is to be kept whole in the next attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fxpipe.ir._torch import CALL
from fxpipe.trace.patches import patched


class Running:
    """The modules of a model that are running now, a stack with the innermost module last."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self._raised: tuple[BaseException, nn.Module] | None = None

    @property
    def part(self) -> nn.Module | None:
        """The innermost submodule that is running; None if only the model itself is, or nothing."""
        return self.modules[-1] if len(self.modules) > 1 else None

    def raised_by(self, error: BaseException) -> nn.Module | None:
        """The innermost module that was running when an exception was raised, or the exception
        that it was raised from; None if it was raised outside of all modules."""
        if self._raised is None:
            return None
        known, module = self._raised
        return module if any(each is known for each in _chain(error)) else None

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Inside the ``with`` block, calls of the modules of a model are recorded here."""
        # Where modules share a module, torch.export calls objects of its own in the place of each,
        # which have the attributes of the module in common with it.
        parts = {id(vars(module)): module for module in model.modules()}

        def replace(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                part = parts.get(id(vars(module)))
                if part is None:
                    return original(module, *args, **kwargs)
                self.modules.append(part)
                try:
                    return original(module, *args, **kwargs)
                except Exception as error:
                    if self.raised_by(error) is None:
                        self._raised = error, part
                    raise
                finally:
                    self.modules.pop()

            return call

        with patched(nn.Module, CALL, replace):
            yield


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, then the one that it was raised from or while handling, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
