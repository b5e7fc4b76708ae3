"""The cache on disk: what tracing and checking a model for a kind of call has come to, for other
processes that compile the same model.

::

    model, options, call ─ key ─ FOLDER/3f0c...json ─ entry ─┬─ meaning: the batch dimensions
                           │                                 ├─ model graph, as data
                        digest: code, structure, versions    └─ what the graph depends on

    digest      hashes values, and the code of functions and classes
    versions    where code comes from: the user, an installed package, PyTorch, fxpipe
    key         hashes all that a compilation depends on
    data        values as JSON, and back
    relations   sizes for which a graph is right as JSON, and back
    targets     the functions that a graph in a file may call
    graphs      model graphs as JSON, and back
    entry       what is kept of one compilation
    folder      reads and writes the files

What follows the model graph (the passes, the cut, the programs) is made anew in each process. A
graph that has been read is run once beside the model, on as few rows of the example as the model
takes, and is dropped if the two differ. A file holds no code: the names of the operators and
functions in it are looked up in a table.
"""
