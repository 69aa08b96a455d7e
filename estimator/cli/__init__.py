"""The command line: each command parses, calls and prints; `main` joins them, `console` prints."""
