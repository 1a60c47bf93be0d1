"""The command line as it is declared: which commands there are, what each takes and what is said of it.

Nothing here does what a command does, and nothing is imported that takes long: help, completion and mistakes come at
once. `proxy/price_keeper/cli/entry_point.py` brings what was asked for to the module of `price_keeper.commands` that does it.

parser       a parser that tells mistakes with the nearest good word, and has examples
kinds        what a single argument may be
options      options that many commands have
whole        all of it, in groups: running, configuring, budgets, access, operating
completion   scripts for shells, made from the parser (bash, zsh, fish)
terminal     what a terminal can show
"""
