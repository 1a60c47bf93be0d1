"""Completion for zsh: a function for each command, by `_arguments`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from shlex import quote

from price_keeper.commandline.completion import FILES, CommandCompletion, OptionCompletion, ValueCompletion

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
    """`_arguments` takes one name at a time; the long one is what is worth completing."""
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
