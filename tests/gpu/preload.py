"""The imports that the server, from which the parts' processes are forked, makes once for all. None
of them may touch a GPU."""

from contextlib import suppress

import fxpipe

fxpipe.compile  # noqa: B018 - it is imported on its first use

with suppress(ImportError):
    import transformers  # noqa: F401
