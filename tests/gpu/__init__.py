"""The kit for the day there is a GPU: it finds out in nine minutes how fxpipe runs on CUDA GPUs.

    python -m tests.gpu FOLDER

A machine with a GPU may be there for a few minutes only. So all questions that only a GPU answers
are asked by one command, which needs nothing from outside, was written before there was a GPU, and
loses nothing when it is interrupted:

- each question is a *part* (``parts.py``), which runs in a process of its own, with a limit on its
  time: neither a broken CUDA context nor a hang spoils the parts that follow;
- ``FOLDER/results.json`` and ``FOLDER/results.txt`` are written after each part;
- ``--dry-run`` runs the same code, with small sizes, on the simulated accelerator.
"""
