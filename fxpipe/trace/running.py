"""Which modules of a model are running while it is traced, and in which one it has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fxpipe.ir._torch import CALL
from fxpipe.trace.patches import patched


class Running:
    """The modules that are running, the innermost last."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self._raised: tuple[BaseException, nn.Module] | None = None

    @property
    def part(self) -> nn.Module | None:
        """The innermost module within the model, None if that is running alone, or nothing is."""
        return self.modules[-1] if len(self.modules) > 1 else None

    def raised_by(self, error: BaseException) -> nn.Module | None:
        """The innermost module that was running when an exception, or one that led to it, came up;
        None if none was."""
        if self._raised is None:
            return None
        known, module = self._raised
        return module if any(each is known for each in _chain(error)) else None

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Meanwhile the modules of a model are watched."""
        parts = set(model.modules())

        def replace(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if module not in parts:
                    return original(module, *args, **kwargs)
                self.modules.append(module)
                try:
                    return original(module, *args, **kwargs)
                except Exception as error:
                    if self.raised_by(error) is None:
                        self._raised = error, module
                    raise
                finally:
                    self.modules.pop()

            return call

        with patched(nn.Module, CALL, replace):
            yield


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those during whose handling it was raised."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
