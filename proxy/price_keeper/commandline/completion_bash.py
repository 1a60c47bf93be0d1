"""Completion for bash, from 3.2 on: one function, and a table of what may stand where. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from shlex import quote

from price_keeper.commandline.completion import CommandCompletion, ValueCompletion

_BASH_SCRIPT = r"""# bash completion for price-keeper; make it anew with: price-keeper completion bash

# What may stand there: words, or <files>, or <folders>.
_price_keeper_says() {
  case "$1" in
@TABLE@
    *) said="" ;;
  esac
}

_price_keeper() {
  local word="${COMP_WORDS[COMP_CWORD]}" path="" place=1 option="" said="" joined="" each i
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    each="${COMP_WORDS[i]}"
    if [[ "$each" == "=" ]]; then
      continue # bash takes --option=value apart, and http://host
    elif [[ -n "$joined" || "$each" == ":" ]]; then
      [[ "$each" == ":" ]] && joined=yes || joined=""
    elif [[ -n "$option" ]]; then
      option=""
    elif [[ "$each" == -* ]]; then
      _price_keeper_says "${path# }:$each"
      [[ -n "$said" ]] && option="$each"
    else
      _price_keeper_says "${path# }:commands"
      if [[ " $said " == *" $each "* ]]; then path="$path $each"; else place=$((place + 1)); fi
    fi
  done
  path="${path# }"
  [[ "$word" == "=" ]] && word=""
  if [[ -n "$option" ]]; then
    _price_keeper_says "$path:$option"
  elif [[ "$word" == -* ]]; then
    _price_keeper_says "$path:options"
  else
    _price_keeper_says "$path:commands"
    [[ -z "$said" ]] && _price_keeper_says "$path:$place"
  fi
  case "$said" in
    "<files>") _price_keeper_fill "$word" -f ;;
    "<folders>") _price_keeper_fill "$word" -d ;;
    "<any>") ;;
    *) _price_keeper_fill "$word" -W "$said" ;;
  esac
}

_price_keeper_fill() {
  local word="$1" each
  shift
  [[ "$1" != -W ]] && compopt -o filenames 2> /dev/null
  while IFS= read -r each; do
    COMPREPLY+=("$each")
  done < <(compgen "$@" -- "$word")
}

complete -F _price_keeper price-keeper
"""


def render_bash(commands: Iterable[CommandCompletion]) -> str:
    table = [
        f"    {quote(key)}) said={quote(words)} ;;" for each in commands for key, words in _list_bash_entries(each)
    ]
    return _BASH_SCRIPT.replace("@TABLE@", "\n".join(table))


def _list_bash_entries(command: CommandCompletion) -> Iterator[tuple[str, str]]:
    path = " ".join(command.path)
    if command.subcommands:
        yield f"{path}:commands", " ".join(name for name, _ in command.subcommands)
    yield f"{path}:options", " ".join(name for option in command.options for name in option.names)
    for option in command.options:
        if option.value is not None:
            yield from ((f"{path}:{name}", _format_bash_value(option.value)) for name in option.names)
    for position, value in enumerate(command.arguments, 1):
        if value.words or value.path_kind:
            yield f"{path}:{position}", _format_bash_value(value)


def _format_bash_value(value: ValueCompletion) -> str:
    """Something in any case, so that an option is known to take a value."""
    return f"<{value.path_kind}>" if value.path_kind else " ".join(value.words) or "<any>"
