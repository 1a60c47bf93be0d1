"""`price-keeper completion`: print the completion script of a shell, which shtab makes from the declared commands.

The script completes without starting price-keeper. Added to what shtab does: which values to suggest, and in bash
words with `:` or `=` in them.
"""

from __future__ import annotations

from argparse import Namespace

import shtab

from price_keeper.cli.command_parser import CommandParser
from price_keeper.cli.root_parser import build_root_parser

# shtab's own for fish takes --option=value as one path.
_FISH_VALUE = "(commandline -ct | string replace -r '^--[^=]*=' '')"
_PATHS = {
    "FILE": {**shtab.FILE, "fish": f"(__fish_complete_path {_FISH_VALUE})"},
    "DIR": {**shtab.DIRECTORY, "fish": f"(__fish_complete_directories {_FISH_VALUE})"},
}

# bash 3.2, which macOS has, takes no unquoted parenthesis behind =~, and would refuse the whole script.
_BASH_IS_PATH = "=~ _(file|dir|glob|FILE|DIR|GLOB)|File|Dir|Glob", "== _shtab_compgen_*"

# bash splits http://host and --option=value at these characters; shtab's function expects neither.
_BASH_FUNCTION = "_price_keeper"  # a public name: who has an alias completes it by this function
_BASH_JOIN_WORDS = r"""() {
  local previous="" word words=()
  for word in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do
    if [[ "$word" == ":" || "$previous" == ":" ]]; then
      words[${#words[@]}-1]+="$word"
    elif [[ "$word" != "=" ]]; then
      words+=("$word")
    fi
    previous="$word"
  done
  [[ "$previous" == "=" ]] && words+=("")
  local COMP_WORDS=("${words[@]}") COMP_CWORD=$((${#words[@]} - 1))
  _shtab_price_keeper
}
"""


def run_completion(args: Namespace) -> int:
    root = build_root_parser()
    _declare_values(root)
    script = shtab.complete(root, args.shell)
    if args.shell == "bash":
        script = f"{script.replace(*_BASH_IS_PATH)}\n"
        script += f"{_BASH_FUNCTION}{_BASH_JOIN_WORDS}complete -F {_BASH_FUNCTION} {root.prog}"
    print(script)
    return 0


def _declare_values(parser: CommandParser) -> None:
    """Declare files, folders and suggestions as shtab reads them. The parser is then good for completion alone."""
    for action in parser.actions:
        if action.metavar in _PATHS:
            action.complete = _PATHS[action.metavar]  # type: ignore[attr-defined]
        elif action.metavar in parser.suggestions:
            action.choices = tuple(parser.suggestions[action.metavar])
    for subcommand in parser.subcommands.values():
        _declare_values(subcommand)
