"""What the server of processes imports once for all parts. None of this may touch a GPU."""

from contextlib import suppress

import fxpipe

fxpipe.compile  # noqa: B018 - it is imported on its first use

with suppress(ImportError):
    import transformers  # noqa: F401
