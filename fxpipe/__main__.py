from fxpipe.cli import main

main(prog_name="python -m fxpipe")
