"""The `dase` command line: parse, call, print. No logic."""
