"""The compiler and the runner of a pipeline whose stages are in several processes, its ranks.

::

    every rank    trace ─ ... ─ partition ─ ... ─ step graph ─ project ─ its own program
                                    │                  │                       │
                          rank 0 says where     all compare what       all say that they are
                                                they have made         ready for the same call

Every rank compiles the whole model, and runs its own part of the step graph. The programs of the
ranks fit together only if all ranks have compiled the same, so the ranks compare what they have
compiled before anything is run.
"""
