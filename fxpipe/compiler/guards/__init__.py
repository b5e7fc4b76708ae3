"""Guards: the conditions under which a compiled program may serve a call. Where one does not hold,
the call is compiled anew.

::

    compiled for x: float32 [*, 3, 64, 64], train, no autocast, attributes head.scale = 3

    guards on the call     arguments    which are given, and how they are nested
                           shape        dtype and sizes of a tensor; sizes that may vary are "*"
                           constant     an argument that is no tensor
                           rows         the largest batch for which the graph is right
                           sizes        the relations between sizes for which the graph is right
                           autocast     the dtype on each kind of device
                           gradients    which tensors require them, if the forward asks for that
    guards on the model    modules      the modules, their training flags, and which have hooks
                           state        the shapes of parameters and buffers, the attributes read,
                                        which parameters are frozen, if the forward asks for that

All guards of a program are one list. :meth:`.Guards.failure` goes through it and says which guard
fails first, and how: ``shape of x: (8, 4) → (8, 6)``.

Whether the guards on the call hold follows from the call's :func:`.signature`. So a program that
has served a call serves each call of equal signature, as long as its guards on the model hold.
"""
