"""The order in which the autograd engine takes what is ready.

Each device has a queue, out of which the node with the highest sequence number comes first: the one
that was made last, counted in the thread that made it. Where a stage's computation has been made
later than another stage's copy, a copy that is ready stands behind it, while another device waits
for the gradient::

    ready    copy (made 12th), conv (made 40th, of another micro-batch or stage)
    taken    conv ... conv, copy          by these numbers
             copy, conv ... conv          by :data:`FIRST`
"""

from __future__ import annotations

from torch import Tensor

from fxpipe.ir._torch import set_sequence_number

FIRST = 2**63  # above all that are counted, below the nodes that accumulate into ``.grad``


def first(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors; the node that has made all of them goes ahead of what is ready with it.

    Where nothing is recorded there is no node.
    """
    if tensors and (made_by := tensors[0].grad_fn) is not None:
        set_sequence_number(made_by, FIRST)
    return tensors
