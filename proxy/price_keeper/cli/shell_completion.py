"""Completion scripts for bash, fish and zsh, rendered from the parser. Pure.

`collect_commands` reads commands, options and possible values from the parser; `render_bash`, `render_fish` and
`render_zsh` turn them into a script. A script completes without starting price-keeper.
"""

from __future__ import annotations

from argparse import Action
from collections.abc import Iterable, Iterator, Mapping
from shlex import quote
from types import MappingProxyType
from typing import NamedTuple

from price_keeper.cli.command_parser import CommandParser

FILES, FOLDERS = "files", "folders"
_PATH_KINDS = {"FILE": FILES, "DIR": FOLDERS}


class ValueCompletion(NamedTuple):
    """The possible values of an argument: one of the words, or a file or folder; any value if there are neither."""

    name: str
    words: tuple[str, ...] = ()
    path_kind: str = ""


class OptionCompletion(NamedTuple):
    names: tuple[str, ...]
    text: str
    value: ValueCompletion | None  # None for a flag


class CommandCompletion(NamedTuple):
    """One command. `path` holds its words after the program's name, and is empty for the program itself."""

    path: tuple[str, ...]
    summary: str
    subcommands: tuple[tuple[str, str], ...]
    options: tuple[OptionCompletion, ...]
    arguments: tuple[ValueCompletion, ...]


def collect_commands(parser: CommandParser, path: tuple[str, ...] = ()) -> Iterator[CommandCompletion]:
    """The command of this parser, and all its subcommands."""
    subcommands = tuple((name, verb.summary) for name, verb in parser.subcommands.items())
    actions = parser.actions
    options = tuple(_build_option(action) for action in actions if action.option_strings)
    arguments = tuple(_build_value(action, parser.suggestions) for action in actions if not action.option_strings)
    yield CommandCompletion(path, parser.summary, subcommands, options, arguments)
    for name, verb in parser.subcommands.items():
        yield from collect_commands(verb, (*path, name))


def _build_option(action: Action) -> OptionCompletion:
    takes_value = action.nargs != 0
    return OptionCompletion(
        tuple(action.option_strings), _summarize_help(action), _build_value(action) if takes_value else None
    )


def _build_value(action: Action, suggestions: Mapping[str, Iterable[str]] = MappingProxyType({})) -> ValueCompletion:
    name = str(action.metavar or action.dest.upper())
    words = tuple(map(str, action.choices or suggestions.get(name, ())))
    return ValueCompletion(name, words, _PATH_KINDS.get(name, ""))


def _summarize_help(action: Action) -> str:
    """The help text up to its first semicolon."""
    if action.nargs == 0 and action.dest == "help":
        return "tell all of it"
    return (action.help or "").partition(";")[0]


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
    """Never empty: the script recognises options with a value by this text."""
    return f"<{value.path_kind}>" if value.path_kind else " ".join(value.words) or "<any>"


_FISH_SCRIPT = r"""# fish completion for price-keeper; make it anew with: price-keeper completion fish

# Whether the words so far are these commands, and with --place, that so many arguments follow them.
function __price_keeper_at
    argparse 'place=' -- $argv
    set -l path
    set -l place 0
    set -l skips no
    for each in (commandline -opc)[2..-1]
        if test $skips = yes
            set skips no
        else if contains -- $each @VALUED@
            set skips yes
        else if string match -q -- '-*' $each
            continue
        else if contains -- (string join ' ' $path $each) @PATHS@
            set path $path $each
        else
            set place (math $place + 1)
        end
    end
    test "$argv" = "$path"; and begin
        not set -q _flag_place; or test $place = $_flag_place
    end
end

complete -c price-keeper -f
@LINES@
"""


def render_fish(commands: Iterable[CommandCompletion]) -> str:
    command_list = list(commands)
    options_with_value = sorted(
        {name for each in command_list for option in each.options if option.value for name in option.names}
    )
    paths = [_quote_fish(" ".join(each.path)) for each in command_list if each.path]
    lines = [f"complete -c price-keeper {line}" for each in command_list for line in _list_fish_lines(each)]
    return (
        _FISH_SCRIPT.replace("@VALUED@", " ".join(options_with_value))
        .replace("@PATHS@", " ".join(paths))
        .replace("@LINES@", "\n".join(lines))
    )


def _list_fish_lines(command: CommandCompletion) -> Iterator[str]:
    path = "".join(f" {word}" for word in command.path)
    for name, summary in command.subcommands:
        yield f"-n '__price_keeper_at --place=0{path}' -a {name} -d {_quote_fish(summary)}"
    for option in command.options:
        yield f"-n '__price_keeper_at{path}' {_format_fish_option(option)} -d {_quote_fish(option.text)}"
    for position, value in enumerate(command.arguments):
        if value.words or value.path_kind:
            yield f"-n '__price_keeper_at --place={position}{path}' {_format_fish_value(value)}"


def _format_fish_option(option: OptionCompletion) -> str:
    names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    if option.value is None:
        return " ".join(names)
    requirement = "-r" if option.value.path_kind == FILES else "-x"  # -x suppresses the completion of files
    return " ".join([*names, requirement, _format_fish_value(option.value)])


def _format_fish_value(value: ValueCompletion) -> str:
    if value.path_kind:
        return "-F" if value.path_kind == FILES else "-a '(__fish_complete_directories (commandline -ct))'"
    return f"-a {_quote_fish(' '.join(value.words))}"


def _quote_fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_ZSH_SCRIPT = r"""#compdef price-keeper
# zsh completion for price-keeper; make it anew with: price-keeper completion zsh

@FUNCTIONS@

# As a file _price-keeper in the fpath it is called at once; by eval it only says what it is for.
if [[ "$funcstack[1]" == "_price-keeper" ]]; then
  _price_keeper "$@"
else
  compdef _price_keeper price-keeper
fi
"""

_ZSH_FUNCTION_WITH_SUBCOMMANDS = """\
{name}() {{
  local curcontext="$curcontext" state line
  typeset -A opt_args
  local -a commands=(
{verbs}
  )
  _arguments -C {options} '1: :->command' '*:: :->rest' && return
  case $state in
    command) _describe -t commands command commands ;;
    rest)
      case $words[1] in
{cases}
      esac ;;
  esac
}}"""

_ZSH_FUNCTION = """\
{name}() {{
  _arguments -s -S \\
{arguments}
}}"""


def render_zsh(commands: Iterable[CommandCompletion]) -> str:
    return _ZSH_SCRIPT.replace("@FUNCTIONS@", "\n\n".join(_render_zsh_function(each) for each in commands))


def _render_zsh_function(command: CommandCompletion) -> str:
    name = _build_zsh_name(command.path)
    if not command.subcommands:
        arguments = [*map(_format_zsh_option, command.options), *_list_zsh_arguments(command)]
        return _ZSH_FUNCTION.format(name=name, arguments=" \\\n".join(f"    {quote(each)}" for each in arguments))
    subcommands = "\n".join(f"    {quote(f'{verb}:{_escape_zsh(summary)}')}" for verb, summary in command.subcommands)
    cases = "\n".join(f"        {verb}) {_build_zsh_name((*command.path, verb))} ;;" for verb, _ in command.subcommands)
    options = " ".join(quote(_format_zsh_option(each)) for each in command.options)
    return _ZSH_FUNCTION_WITH_SUBCOMMANDS.format(name=name, verbs=subcommands, cases=cases, options=options)


def _build_zsh_name(path: Iterable[str]) -> str:
    return "_".join(["_price_keeper", *path])


def _format_zsh_option(option: OptionCompletion) -> str:
    """`_arguments` takes one name per entry; only the long name is worth completing."""
    text = f"{option.names[-1]}[{_escape_zsh(option.text)}]"
    return text if option.value is None else f"{text}{_format_zsh_value(option.value)}"


def _list_zsh_arguments(command: CommandCompletion) -> Iterator[str]:
    yield from (f"{position}{_format_zsh_value(value)}" for position, value in enumerate(command.arguments, 1))


def _format_zsh_value(value: ValueCompletion) -> str:
    if value.path_kind:
        return f":{value.name}:{'_files' if value.path_kind == FILES else '_files -/'}"
    words = f"({' '.join(value.words)})" if value.words else " "
    return f":{value.name}:{words}"


def _escape_zsh(text: str) -> str:
    for character in "\\[]:":
        text = text.replace(character, f"\\{character}")
    return text
