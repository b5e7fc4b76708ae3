"""Memory and values for the tensors of a model that was built on "meta".

::

    files         a checkpoint on disk, as tensors that are read one at a time, when they are used
    storage       memory for tensors on "meta", on the devices of their stages
    initialise    values for tensors that no checkpoint has, by the modules' own methods
    load          the three together: ``pipe.load(path)`` and ``pipe.materialize()``
"""

from __future__ import annotations

from fxpipe.loading.files import stored_tensors

__all__ = ["stored_tensors"]
