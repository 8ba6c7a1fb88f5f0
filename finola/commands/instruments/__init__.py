"""The instruments of `finola inspect`: one module each, with `add_parser(subparsers)` and `run(args)`."""
