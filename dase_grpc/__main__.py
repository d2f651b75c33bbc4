"""Lets `python -m dase_grpc` be the `dase` command."""

from dase_grpc.cli import main

if __name__ == "__main__":
    main()
