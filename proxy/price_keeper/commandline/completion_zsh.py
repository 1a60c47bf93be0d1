"""Completion for zsh: a function for each command, by `_arguments`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from shlex import quote

from price_keeper.commandline.completion import FILES, Command, Option, Value

_SCRIPT = r"""#compdef price-keeper
# zsh completion for price-keeper; make it anew with: price-keeper completion zsh

@FUNCTIONS@

# As a file _price-keeper in the fpath it is called at once; by eval it only says what it is for.
if [[ "$funcstack[1]" == "_price-keeper" ]]; then
  _price_keeper "$@"
else
  compdef _price_keeper price-keeper
fi
"""

_WITH_VERBS = """\
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

_WITHOUT = """\
{name}() {{
  _arguments -s -S \\
{arguments}
}}"""


def script(commands: Iterable[Command]) -> str:
    return _SCRIPT.replace("@FUNCTIONS@", "\n\n".join(_function(each) for each in commands))


def _function(command: Command) -> str:
    name = _name(command.path)
    if not command.verbs:
        arguments = [*map(_option, command.options), *_arguments(command)]
        return _WITHOUT.format(name=name, arguments=" \\\n".join(f"    {quote(each)}" for each in arguments))
    verbs = "\n".join(f"    {quote(f'{verb}:{_safe(summary)}')}" for verb, summary in command.verbs)
    cases = "\n".join(f"        {verb}) {_name((*command.path, verb))} ;;" for verb, _ in command.verbs)
    options = " ".join(quote(_option(each)) for each in command.options)
    return _WITH_VERBS.format(name=name, verbs=verbs, cases=cases, options=options)


def _name(path: Iterable[str]) -> str:
    return "_".join(["_price_keeper", *path])


def _option(option: Option) -> str:
    """`_arguments` takes one name at a time; the long one is what is worth completing."""
    told = f"{option.names[-1]}[{_safe(option.text)}]"
    return told if option.value is None else f"{told}{_may_be(option.value)}"


def _arguments(command: Command) -> Iterator[str]:
    yield from (f"{place}{_may_be(value)}" for place, value in enumerate(command.arguments, 1))


def _may_be(value: Value) -> str:
    if value.place:
        return f":{value.name}:{'_files' if value.place == FILES else '_files -/'}"
    words = f"({' '.join(value.words)})" if value.words else " "
    return f":{value.name}:{words}"


def _safe(text: str) -> str:
    for sign in "\\[]:":
        text = text.replace(sign, f"\\{sign}")
    return text
