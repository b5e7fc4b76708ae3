"""Runs the kit: ``python -m tests.gpu FOLDER``."""

from tests.gpu.needs import missing

if __name__ == "__main__":
    lacking = missing()
    if lacking:  # before the imports of these packages fail
        raise SystemExit("\n".join(["The kit cannot run here.", *lacking]))
    from tests.gpu.cli import main

    main()
