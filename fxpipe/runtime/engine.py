"""The order in which the autograd engine runs nodes that are ready: copies go first.

For each device the engine has a queue, and of the nodes that are ready it runs the one with the
highest sequence number: the one that was made last, counted in the thread that made it. So a copy
that was made before a computation of another stage would wait for that computation, while another
device waits for the gradient that the copy brings::

    ready    copy (made 12th), conv (made 40th, of another micro-batch or stage)
    taken    conv ... conv, copy          by these numbers
             copy, conv ... conv          by :data:`FIRST`
"""

from __future__ import annotations

from torch import Tensor

from fxpipe.ir._torch import set_sequence_number

# It is above all numbers that threads count to. Nodes that add to ``.grad`` have the largest number
# of 64 bits, so they still run first.
FIRST = 2**63


def first(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Let the one autograd node that has made all these tensors run ahead of other ready nodes.

    Returns the tensors. Nothing is done where no gradient is recorded, and so no node was made.
    """
    if tensors and (made_by := tensors[0].grad_fn) is not None:
        set_sequence_number(made_by, FIRST)
    return tensors
